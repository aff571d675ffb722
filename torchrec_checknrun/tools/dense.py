"""Read a checkpoint's content beside table rows by flat names, without a model.

The names of the state ``model`` are those of its state dict; names of other states begin with the
state's name, and names of per-rank states with ``<state>.rank<n>``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.boxes import Box, tiles
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import BlockHeader, decode_block, decode_state_chunk, name_of
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.reader import (
    VISIBLE_SECONDS,
    StoredChunk,
    coalesced_reads,
    dense_key,
    read_chunk,
)
from torchrec_checknrun.store.coalescing import Place
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.keys import key_name

MODEL = "model"
"""The state whose names have no prefix."""
KEPT_BYTES = 1 << 30
"""Bytes that a ``DenseReader`` keeps: as many as a rank writes as differences."""
_TWICE = (
    "{} has two values that would be called {!r}: give other names to the state objects, or to the "
    "keys of a state dict, where 'a.b' may be beside a 'b' in 'a', or 1 beside '1'"
)


class DenseReader:
    """A reader of the chunks of one checkpoint after another.

    The reader keeps the contents beside table rows, to which differences of the next checkpoint are
    added: else each of them would be read with all those before.

    Args:
        most: bytes to keep.
        visible_seconds: as for ``read_chunk``.

    Attributes:
        bytes_read: from the storage, so far.
    """

    def __init__(
        self, root: Folder, most: int = KEPT_BYTES, visible_seconds: float = VISIBLE_SECONDS
    ) -> None:
        self._root = root
        self._left = most
        self._visible_seconds = visible_seconds
        self._kept: dict[object, tuple[str, memoryview]] = {}
        self.bytes_read = 0

    def read(
        self,
        chunk: StoredChunk,
        at_hand: Callable[[Place], memoryview | None] = lambda place: None,
    ) -> memoryview:
        """Return a chunk's content, verified; see ``read_chunk``."""
        place = dense_key(chunk.entry)
        before = self._kept.get(place)
        known = {} if before is None else dict([before])
        link: StoredChunk | None = chunk
        while link is not None and link.key not in known:  # a difference, and all that it is one to
            self.bytes_read += link.entry.length
            link = link.base
        content = read_chunk(
            self._root,
            chunk,
            visible_seconds=self._visible_seconds,
            known=known,
            at_hand=at_hand,
        )
        if before is not None:
            self._left += len(self._kept.pop(place)[1])
        if place is not None and len(content) <= self._left:
            self._left -= len(content)
            self._kept[place] = chunk.key, content
        return content


def read_dense(
    root: Folder,
    chunks: tuple[StoredChunk, ...],
    read: Callable[[StoredChunk], memoryview] | None = None,
) -> dict[str, Any]:
    """Read all values of a checkpoint that are no table rows, into memory.

    Args:
        chunks: the checkpoint's chunks (the head of a chain has all such values).
        read: reads a chunk's content, verified; None: from the root.

    Returns:
        By name: tensors (also of NumPy arrays, except of types that PyTorch lacks), lists of text
        and times, and other values as they are.

    Raises:
        CorruptCheckpoint: a chunk differs from what was written.
        IncompatibleCheckpoint: two values would have the same name.
    """
    if read is None:
        read = partial(read_chunk, root, at_hand=coalesced_reads(root, chunks).part)
    found: dict[str, Any] = {}
    pieces: dict[str, torch.Tensor] = {}
    for problem in piece_problems(chunks):  # before memory of their size is taken
        raise CorruptCheckpoint(problem)
    for chunk in chunks:
        entry, header = chunk.entry, chunk.header
        if isinstance(entry, StateEntry):
            content = decode_state_chunk(entry, read(chunk))
            prefix = entry.name if entry.rank is None else f"{entry.name}.rank{entry.rank}"
            for key, value in _leaves(content, "" if prefix == MODEL else prefix):
                if key in found:
                    raise IncompatibleCheckpoint(_TWICE.format(chunk.checkpoint, key))
                found[key] = value
        elif isinstance(header, BlockHeader):
            key = _key(header)
            if key not in pieces:
                pieces[key] = torch.zeros(header.size, dtype=header.dtype, device="cpu")
            place = header.box.slices(Box.whole(header.size))
            pieces[key][place].copy_(decode_block(header, read(chunk)))
    found = {k: v for k, v in found.items() if v is not None or k not in pieces}  # in lists
    if clash := sorted(found.keys() & pieces.keys()):
        raise IncompatibleCheckpoint(_TWICE.format(chunks[0].checkpoint, clash[0]))
    return {**found, **pieces}


def piece_problems(chunks: Iterable[StoredChunk]) -> Iterator[str]:
    """Yield a line for each sharded tensor with missing, duplicate or mismatched pieces."""
    pieces: dict[str, list[tuple[StoredChunk, BlockHeader]]] = {}
    for chunk in chunks:
        if isinstance(chunk.header, BlockHeader):
            pieces.setdefault(_key(chunk.header), []).append((chunk, chunk.header))
    for of_tensor in pieces.values():
        name = name_of((_key(of_tensor[0][1]),))
        chunk, first = of_tensor[0]
        if len({(header.path, header.size, header.dtype) for _, header in of_tensor}) > 1:
            yield f"{chunk.checkpoint}: pieces of {name} are of several sizes or types"
        elif not tiles(Box.whole(first.size), [header.box for _, header in of_tensor]):
            values = sum(header.box.volume for _, header in of_tensor)
            yield (
                f"{chunk.checkpoint} holds {values} of the {math.prod(first.size)} values of "
                f"{name}, or some twice: pieces are missing"
            )


def _key(header: BlockHeader) -> str:
    path = header.path[1:] if header.path[:1] == (MODEL,) else header.path
    return ".".join(map(key_name, path))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield leaf values and empty containers, each with its path of keys."""
    if isinstance(value, dict) and value:
        items: Any = value.items()
    elif type(value) in (list, tuple, deque) and value:
        items = enumerate(value)
    else:
        yield path, _as_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key_name(key)}" if path else key_name(key))


def _as_tensor(value: np.ndarray | np.generic) -> Any:
    """Return an array as a tensor; as lists if it holds text or times, as it is if torch lacks its
    type.
    """
    array = np.array(value)
    if array.dtype.kind in "SUmM":
        return array.tolist()
    try:
        return torch.from_numpy(array)
    except TypeError:  # as of long doubles
        return array
