"""Find a model's state at every step, without asking for it as long as nothing was replaced.

A state dict takes a large model a millisecond, and says the same tensors each time. So its encoded
form is kept, whose pieces are the live memory, with all modules, parameters and buffers that it was
made of; to compare these takes a few microseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from torchrec_checknrun.dense.references import local_tensors
from torchrec_checknrun.format.state import encode_state
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.memory.header import Piece
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.state_dict import MODEL, StoredTables, drop_tables, find_blocks
from torchrec_checknrun.model.tracked import TrackedModel

_ALIGN = 64


def section(content: object) -> list[Piece]:
    """Encode a value as a tree with its size, and the payload that the tree points into."""
    tree, pieces = encode_state(content, "image")
    data = msgspec.json.encode(tree)
    data += bytes(-len(data) % _ALIGN)
    flat: list[Piece] = [p if isinstance(p, bytes) else p.cast("B") for p in pieces]
    payload = sum(map(len, flat))
    padding = -payload % _ALIGN
    head = len(data).to_bytes(8, "little") + (payload + padding).to_bytes(8, "little")
    return [head + bytes(_ALIGN - len(head)), data, *flat, bytes(padding)]


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
    """The dense part of a model's state dict, encoded, and the names of its parameters.

    Args:
        tracked: knows the tables, which are left out.
    """

    def __init__(self, model: nn.Module, tracked: TrackedModel) -> None:
        self._model, self._tracked = model, tracked
        self._pieces: list[Piece] | None = None
        self._modules: list[tuple[nn.Module, list[Any], int, int]] = []
        self._tensors: list[tuple[Mapping[str, Any], str, Any, int, Any]] = []
        self._names: dict[torch.Tensor, str] | None = None

    def pieces(self) -> list[Piece]:
        """Return the content as a section.

        Raises:
            UnsupportedState: it can't be stored.
        """
        if self._pieces is not None and self._is_same():
            return self._pieces
        live = {MODEL: self._model.state_dict()}
        stored = StoredTables(self._tracked.tables, [s.local for s in self._tracked.shards])
        dense = drop_tables(live[MODEL], stored)
        blocks = find_blocks(live, stored)
        pieces = section({"states": {MODEL: dense}, "parts": parts_of(blocks)})
        self._note()
        self._names = None
        tensors = [t for _, t in leaves(dense, (torch.Tensor,))]
        tensors += [block.tensor for block in blocks]
        plain = isinstance(dense, dict) and all(isinstance(v, torch.Tensor) for v in dense.values())
        self._pieces = pieces if plain and self._are_live(tensors) else None
        return pieces

    def names(self) -> dict[torch.Tensor, str]:
        """Return the parameters' names; call ``pieces`` first."""
        if self._names is None:
            self._names = {p: name for name, p in self._model.named_parameters()}
        return self._names

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._modules = [
            (m, list(m._modules.values()), len(m._parameters), len(m._buffers)) for m in modules
        ]
        self._tensors = []
        for module in modules:
            own: Mapping[str, Any]
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is None:  # a buffer that is made later
                        self._tensors.append((own, name, None, 0, None))
                    for local in local_tensors(tensor):
                        self._tensors.append((own, name, tensor, local.data_ptr(), local.shape))

    def _is_same(self) -> bool:
        for module, modules, parameters, buffers in self._modules:
            if len(module._parameters) != parameters or len(module._buffers) != buffers:
                return False
            now = module._modules.values()
            if len(now) != len(modules) or not all(map(operator.is_, now, modules)):
                return False
        for own, name, tensor, address, shape in self._tensors:
            if own.get(name) is not tensor or not _is_at(tensor, address, shape):
                return False
        return True

    def _are_live(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether the pieces are live memory: not copies by hooks, nor of strange layouts."""
        known = {address for *_, address, _ in self._tensors}
        return all(
            tensor.is_cpu and tensor.is_contiguous() and tensor.data_ptr() in known
            for tensor in tensors
            if tensor.numel()
        )


def _is_at(tensor: Any, address: int, shape: Any) -> bool:
    if tensor is None:
        return True
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return bool(tensor.data_ptr() == address and tensor.shape == shape)
    return any(t.data_ptr() == address and t.shape == shape for t in local_tensors(tensor))
