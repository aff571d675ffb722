"""Encode a model's state at every step, as long as nothing was replaced only once.

The pieces of the encoded form are the live memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.dense_model import DenseModel, DensePart
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.shared_memory.header import Piece, as_piece
from torchrec_checknrun.values.state import Tree, encode_state

STATES, PARTS = "states", "parts"
"""Names in a section: state dicts by name, and local parts of sharded tensors."""
_ALIGN = 64


def section(content: object) -> list[Piece]:
    """Encode a value as a tree with its size, and the payload that the tree points into."""
    tree, payload = encode_state(content, "image")
    return sealed(tree, [*map(as_piece, payload)])


def sealed(tree: Tree, payload: Sequence[Piece]) -> list[Piece]:
    """Make a section of what ``encode_state`` returns, its payload as pieces."""
    data = msgspec.json.encode(tree)
    data += bytes(-len(data) % _ALIGN)
    size = sum(map(torch.Tensor.numel, payload))
    padding = -size % _ALIGN
    head = len(data).to_bytes(8, "little") + (size + padding).to_bytes(8, "little")
    head += bytes(_ALIGN - len(head))
    return [as_piece(head + data), *payload, as_piece(bytes(padding))]


def read_section(content: memoryview) -> tuple[Any, memoryview, memoryview]:
    """Return the tree and the payload of the first section, and the sections after it.

    Raises:
        ValueError, msgspec.MsgspecError: there is none.
    """
    data, payload = (int.from_bytes(content[at : at + 8], "little") for at in (0, 8))
    end = _ALIGN + data + payload
    if end > len(content):
        raise ValueError(f"{end} bytes of {len(content)}")
    tree = msgspec.json.decode(bytes(content[_ALIGN : _ALIGN + data]).rstrip(b"\0"))
    return tree, content[_ALIGN + data : end], content[end:]


def parts_of(blocks: list[Block]) -> list[dict[str, Any]]:
    """Return local parts of sharded tensors with their names, to be encoded."""
    return [{"name": part_name(block), "value": block.tensor} for block in blocks]


def part_name(block: Block) -> str:
    """Name a local part of a sharded tensor."""
    return f"{block.path!r} {block.box.spans!r}"


class ModelContent:
    """The model's part of a rank's state, encoded; its pieces are live memory.

    Args:
        model: its state beside the tables.
    """

    def __init__(self, model: DenseModel) -> None:
        self._model = model
        self._part: DensePart | None = None
        self._pieces: list[Piece] = []

    def pieces(self) -> list[Piece]:
        """Return the content as a section.

        Raises:
            UnsupportedState: it can't be stored.
        """
        part = self._model.find()
        if part is not self._part:
            part.require_restorable()
            states = {MODEL: {**part.dense, **part.of_some}}
            self._pieces = section({STATES: states, PARTS: parts_of(part.parts)})
            self._part = part
        return self._pieces

    def names(self) -> dict[torch.Tensor, str]:
        """Return the parameters' names; call ``pieces`` first."""
        assert self._part is not None
        return self._part.names
