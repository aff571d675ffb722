"""Table shards inside a state dict, for those who call ``dcp.save`` and ``dcp.load`` themselves.

TorchRec puts tables (``…embedding_bags.t.weight``) and fused optimizer state
(``state.<weight>.<t>.momentum1``) into state dicts as ShardedTensor or DTensor whose local shards
are views of the kernels' memory. Here they are found, rows and their optimizer state are joined
again; other sharded tensors are blocks, and what remains is the dense part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torchrec_checknrun.blocks import Block, Span
from torchrec_checknrun.chunks import dtype_name
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.state import SHARDED, TORCH_DTYPES

_WEIGHT = ".weight"


@dataclass
class _Sharded:
    """One ShardedTensor or DTensor of a state dict, both seen alike."""

    path: tuple[str | int, ...]
    size: tuple[int, ...]
    shards: list[tuple[tuple[int, ...], torch.Tensor]]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(str(key) for key in self.path)


class StoredTables:
    """What is written as table rows, to tell it from the rest of a state dict.

    Args:
        tables: names of all tables, whichever rank holds them.
        shards: the local shards that are written.
    """

    def __init__(self, tables: Iterable[str], shards: Iterable[LocalShard]) -> None:
        self._weights = {table + _WEIGHT for table in tables}
        self._memory = {
            tensor.untyped_storage().data_ptr() for shard in shards for tensor in shard.tensors
        }

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a local tensor is a view of that memory (one without elements needs none)."""
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._memory

    def covers(self, value: object) -> bool:
        """Whether a state-dict leaf is restored as table rows or blocks: a sharded tensor, or a
        data-parallel table or its optimizer state.
        """
        return is_sharded(value) or (
            isinstance(value, torch.Tensor) and value.numel() > 0 and self.hold(value)
        )

    def name(self, key: object) -> bool:
        """Whether a key is a table's weight, under which its optimizer state is kept; a combined
        optimizer puts the name of its part before it.
        """
        while isinstance(key, str) and key:
            if key in self._weights:
                return True
            key = key.partition(".")[2]
        return False


def is_sharded(value: object) -> bool:
    """Whether a state-dict leaf is a table, a table's optimizer state or another sharded tensor."""
    return isinstance(value, SHARDED)


def drop_tables(value: Any, stored: StoredTables) -> Any:
    """A copy of a state dict without its sharded leaves (see ``find_blocks``) and data-parallel
    tables, and without their optimizer's entries.
    """
    if is_sharded(value):
        return None
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        dropped = drop_tables(item, stored)
        of_table = isinstance(item, dict) and not dropped and stored.name(key)
        if not of_table and not stored.covers(item):
            kept[key] = dropped
    return kept


def find_blocks(
    state_dict: dict[str, Any], stored: StoredTables, optimizers: Container[object] = ()
) -> list[Block]:
    """Local shards in a state dict that are not stored as table rows.

    Args:
        optimizers: top-level keys of optimizers' state dicts: what is sharded there under a table's
            name is the table's state, even if its memory is that of shards that have since moved
            to other ranks.

    Raises:
        UnsupportedState: one can't be stored as it is, or has a table's name but not its memory.
    """
    found: list[_Sharded] = []
    _collect(state_dict, (), found)
    blocks = []
    for sharded in found:
        if all(stored.hold(tensor) for _, tensor in sharded.shards):
            continue
        if any(stored.name(key) for key in sharded.path[-2:]):
            if sharded.path[0] in optimizers:
                continue
            raise UnsupportedState(
                f"{sharded.name} is not the memory of the table of that name that is tracked: "
                "track the model that is saved, and save one model at a time (if the table was "
                "sharded anew, by update_shards, make the optimizer anew as well)"
            )
        layout = _layout(sharded.value)
        for offset, tensor in sharded.shards:
            if tensor.dim() not in (1, 2) or dtype_name(tensor.dtype) not in TORCH_DTYPES:
                raise UnsupportedState(
                    f"{sharded.name} is sharded {tensor.dtype} of {tensor.dim()} dimensions: only "
                    "one or two dimensions of plain data types can be stored"
                )
            (row, col), (rows, cols) = (*offset, 0)[:2], (*tensor.shape, 1)[:2]
            rectangle = Rectangle(row, row + rows, col, col + cols)
            if rectangle.area:
                blocks.append(Block(sharded.path, sharded.size, rectangle, tensor, layout))
    return blocks


def find_shards(state_dict: dict[str, Any]) -> tuple[list[LocalShard], dict[str, TableShape]]:
    """Local shards in a state dict, weights joined with their fused optimizer state.

    Returns:
        This rank's shards, and the shapes of all tables. A table's name is its weight's state-dict
        name without ``.weight``, whatever the key above it.

    Raises:
        UnsupportedState: there is a table's optimizer state without the table.
    """
    found: list[_Sharded] = []
    _collect(state_dict, (), found)
    weights = {str(s.path[-1]): s for s in found if _is_weight(s)}
    if len(weights) != sum(_is_weight(s) for s in found):
        raise UnsupportedState(
            "two tables of the state dict have the same name: save one model at a time"
        )
    states: dict[str, dict[str, _Sharded]] = {name: {} for name in weights}
    for sharded in found:
        if _is_weight(sharded):
            continue
        owner = str(sharded.path[-2]) if len(sharded.path) > 1 else ""
        if owner not in weights and not owner.endswith(_WEIGHT):
            continue  # no table's: see find_blocks
        if owner not in weights:
            raise UnsupportedState(
                f"{sharded.name} is sharded, but the state dict has no table weight {owner!r} that "
                "it could be the optimizer state of: put the model's state dict beside it"
            )
        table = owner.removesuffix(_WEIGHT).rsplit(".", 1)[-1]
        states[owner][str(sharded.path[-1]).removeprefix(f"{table}.")] = sharded
    shards = []
    tables = {}
    for key, weight in weights.items():
        name = key.removesuffix(_WEIGHT)
        tables[name] = TableShape(*weight.size)
        shards += _join(name, tables[name], weight, states[key])
    return shards, tables


def _is_weight(sharded: _Sharded) -> bool:
    return len(sharded.size) == 2 and str(sharded.path[-1]).endswith(_WEIGHT)


def _join(
    name: str, shape: TableShape, weight: _Sharded, states: dict[str, _Sharded]
) -> list[LocalShard]:
    shards = []
    for i, (offset, tensor) in enumerate(weight.shards):
        optimizer = {}
        for state_name, state in states.items():
            # TorchRec lists a table's local state shards in the order of its local weight shards;
            # a row-wise state's own offsets don't say which column shard it belongs to.
            _, part = state.shards[i]
            if part.shape not in (tensor.shape[:1], tensor.shape):
                raise UnsupportedState(
                    f"{state.name}: local shard {i} has shape {tuple(part.shape)}, which is "
                    f"neither row-wise nor pointwise for a weight shard {tuple(tensor.shape)}"
                )
            optimizer[state_name] = part
        row, col = offset
        rectangle = Rectangle(row, row + tensor.shape[0], col, col + tensor.shape[1])
        shards.append(LocalShard(name, shape, rectangle, tensor, optimizer))
    return shards


def _collect(value: Any, path: tuple[str | int, ...], found: list[_Sharded]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(item, (*path, key), found)
    elif is_sharded(value):
        # A ShardedTensor's own size() goes through torch's dispatcher: ten times as slow.
        whole = value.metadata().size if isinstance(value, ShardedTensor) else value.size()
        found.append(_Sharded(path, tuple(whole), _local_shards(value), value))


def _layout(value: Any) -> tuple[Span, ...] | None:
    """The rows of all its shards on all ranks, where it tells."""
    if not isinstance(value, ShardedTensor):
        return None
    shards = value.metadata().shards_metadata
    rows = {(s.shard_offsets[0], s.shard_offsets[0] + s.shard_sizes[0]) for s in shards}
    return tuple(sorted(rows))


def _local_shards(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, ShardedTensor):
        return [(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in value.local_shards()]
    local = value.to_local()
    if not isinstance(local, LocalShardsWrapper):
        raise UnsupportedState(
            f"a DTensor of shape {tuple(value.size())} doesn't come from TorchRec: only sharded "
            "tables can be stored so far; keep dense parameters replicated"
        )
    offsets = [tuple(offset) for offset in local.local_offsets()]
    # On a rank without a shard there is still an offset.
    return list(zip(offsets, [s.detach() for s in local.local_shards()], strict=False))
