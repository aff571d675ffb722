"""A chunk: some rows of one shard, or one state object, as one run of bytes with its index entry.

The entry (JSON, in the rank file's index) says what the bytes are; the storage layer adds where
they are and their checksum.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.state import Tree, decode_state

Entry = dict[str, Any]


class EncodedChunk(io.BytesIO):
    """A chunk's index entry and its bytes, which stay in pieces: joined, they would be there twice.

    A BytesIO because DCP's planners hand those over; this package uses ``pieces``.
    """

    def __init__(self, entry: Entry, pieces: list[bytes | memoryview]) -> None:
        super().__init__()
        self.entry = entry
        self.pieces = pieces

    def encode(self) -> EncodedChunk:
        """Itself: what is to be written may also be something that is yet to be encoded."""
        return self

    def getvalue(self) -> bytes:
        """All bytes; no copy of a single piece."""
        return b"".join(self.pieces)


def state_chunk(
    name: str, rank: int | None, tree: Tree, pieces: list[bytes | memoryview]
) -> EncodedChunk:
    """An encoded state object as a chunk; ``rank`` is None for one that all ranks have alike."""
    return EncodedChunk({"kind": "state", "name": name, "rank": rank, "tree": tree}, pieces)


def state_tree(entry: Entry) -> Tree:
    """A state chunk's tree.

    Raises:
        CorruptCheckpoint: there is none.
    """
    tree = entry.get("tree")
    if not isinstance(tree, dict):
        raise CorruptCheckpoint(f"index entry of state {entry.get('name')!r} has no tree")
    return tree


def decode_state_chunk(entry: Entry, payload: bytes | memoryview) -> Any:
    """The state object again.

    Raises:
        CorruptCheckpoint: tree and payload don't fit each other.
    """
    try:
        return decode_state(state_tree(entry), payload)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        name = entry.get("name")
        raise CorruptCheckpoint(f"state {name!r} can't be decoded: {error!r}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """A data type as index entries have it."""
    return str(dtype).removeprefix("torch.")
