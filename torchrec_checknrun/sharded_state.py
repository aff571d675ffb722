"""Table shards inside a state dict, for those who call ``dcp.save`` and ``dcp.load`` themselves.

TorchRec puts tables (``…embedding_bags.t.weight``) and fused optimizer state
(``state.<weight>.<t>.momentum1``) into state dicts as ShardedTensor or DTensor whose local shards
are views of the kernels' memory. Here they are found, rows and their optimizer state are joined
again, and what remains is the dense part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape

_WEIGHT = ".weight"


@dataclass
class _Sharded:
    """One ShardedTensor or DTensor of a state dict, both seen alike."""

    path: tuple[str | int, ...]
    size: tuple[int, ...]
    shards: list[tuple[tuple[int, ...], torch.Tensor]]

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
        """Whether a state-dict leaf is restored as table rows: a sharded tensor, or a data-parallel
        table or its optimizer state.
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
    """Whether a state-dict leaf is a table or a table's optimizer state."""
    return isinstance(value, (ShardedTensor, DTensor))


def drop_tables(
    value: Any, stored: StoredTables, path: str, fused: bool = False, of_fused: bool = False
) -> Any:
    """A copy of a state dict without its table leaves, and without their optimizer's entries.

    Args:
        fused: it is that of TorchRec's optimizers: what is sharded under a table's name is the
            table's optimizer state, even if its memory is that of shards that have since moved to
            other ranks.
        of_fused: it is under such a name.

    Raises:
        UnsupportedState: a sharded tensor holds anything else: it would be lost.
    """
    if is_sharded(value):
        if not of_fused and not all(stored.hold(tensor) for _, tensor in _local_shards(value)):
            raise UnsupportedState(
                f"{path} is a {type(value).__name__} of shape {tuple(value.size())} that belongs "
                "to no table this package tracks: it can't be stored yet (if the table was sharded "
                "anew, by update_shards, make the optimizer anew as well)"
            )
        return None
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        inside = of_fused or (fused and stored.name(key))
        dropped = drop_tables(item, stored, f"{path}.{key}", fused, inside)
        of_table = isinstance(item, dict) and not dropped and stored.name(key)
        if not of_table and not stored.covers(item):
            kept[key] = dropped
    return kept


def find_shards(state_dict: dict[str, Any]) -> tuple[list[LocalShard], dict[str, TableShape]]:
    """Local shards in a state dict, weights joined with their fused optimizer state.

    Returns:
        This rank's shards, and the shapes of all tables. A table's name is its weight's state-dict
        name without ``.weight``, whatever the key above it.

    Raises:
        UnsupportedState: a sharded tensor is neither a table nor a table's optimizer state.
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
        found.append(_Sharded(path, tuple(value.size()), _local_shards(value)))


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
