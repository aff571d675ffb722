"""Split a state dict into table shards, blocks and the dense part.

TorchRec puts tables (``…embedding_bags.t.weight``) and fused optimizer state
(``state.<weight>.<t>.momentum1``) into state dicts as ShardedTensor or DTensor whose local shards
are views of the kernels' memory. ``find_shards`` joins rows and their optimizer state again, for
users who call ``dcp.save`` and ``dcp.load`` themselves; ``find_blocks`` collects the other sharded
tensors, and ``drop_tables`` leaves the dense part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torchrec_checknrun.boxes import Box, Span
from torchrec_checknrun.dense.references import local_tensors
from torchrec_checknrun.dense.tree import WEIGHT, names_table
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.format.chunk import Path, name_of
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.blocks import Block, is_step, require_storable
from torchrec_checknrun.model.collisions import is_averaged
from torchrec_checknrun.placements import LocalPart, local_parts
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.values.dense import is_dense
from torchrec_checknrun.values.dicts import like
from torchrec_checknrun.values.memory_spans import MemorySpans
from torchrec_checknrun.values.state import MOST_DEPTH, SHARDED, Whole

MODEL = "model"
"""The state that holds the model's dense parameters."""
_SIMPLE = frozenset({type(None), bool, int, float, str})
"""Types of most values that are no tensors."""


@dataclass
class _Sharded:
    """One ShardedTensor or DTensor of a state dict, in one form for both.

    Attributes:
        shards: this rank's shards, each with its offset; empty where ``placed`` is set.
        placed: this rank's parts of a DTensor with placements, which is no table; otherwise None.
    """

    path: Path
    size: tuple[int, ...]
    value: Any
    shards: list[tuple[tuple[int, ...], torch.Tensor]]
    placed: list[LocalPart] | None

    @property
    def name(self) -> str:
        return name_of(self.path)

    def parts(self) -> list[LocalPart]:
        """Return this rank's parts of a tensor that is no table.

        Raises:
            UnsupportedState: a part can't be stored.
        """
        parts = self.placed
        if parts is None:
            # A row-wise state is 1-D, though its offsets may have a column.
            parts = [
                LocalPart(Box.at(offset[: tensor.dim()], tensor.shape), tensor)
                for offset, tensor in self.shards
            ]
        for part in parts:
            tensor = part.tensor
            require_storable(self.path, tensor)
            if tensor.dim() != len(self.size):
                raise UnsupportedState(
                    f"{self.name} has {len(self.size)} dimensions, and a local shard of it "
                    f"{tensor.dim()}: let its shards have as many"
                )
        return parts


class StoredTables:
    """The names and memory that are written as table rows, apart from the rest of a state dict.

    Args:
        tables: names of all tables on all ranks.
        shards: the local shards that are written.

    Attributes:
        memory: the shards' memory.
    """

    def __init__(self, tables: Iterable[str], shards: Iterable[LocalShard]) -> None:
        self._tables = set(tables)
        self.memory = MemorySpans([tensor for shard in shards for tensor in shard.tensors])

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a local tensor is a view of table memory; an empty one always is."""
        if not tensor.numel():
            return True
        plain = tensor.layout is torch.strided and type(tensor) is torch.Tensor
        known = (plain or is_dense(tensor)) and tensor.untyped_storage().data_ptr()
        return known in self.memory.storages and self.memory.cover(tensor)

    def is_table(self, parameter: torch.Tensor) -> bool:
        """Return whether an optimizer's parameter is a table, by its memory on this rank."""
        return all(map(self.holds, local_tensors(parameter)))

    def covers(self, value: object) -> bool:
        """Return whether a state-dict leaf is restored as table rows or blocks.

        That is a sharded tensor, or a data-parallel table or its optimizer state.
        """
        return isinstance(value, SHARDED) or (
            isinstance(value, torch.Tensor) and value.numel() > 0 and self.holds(value)
        )

    def name(self, key: object) -> bool:
        """Return whether a key is a table's weight; see ``names_table``."""
        return names_table(key, self._tables)


def split_states(
    live: dict[str, Any], stored: StoredTables, optimizers: Container[object] = ()
) -> tuple[dict[str, Any], list[Block], list[torch.Tensor]]:
    """Split states by name into their dense part and the blocks that this rank writes, in one walk;
    what is written as table rows is in neither.

    Args:
        optimizers: names of the optimizers' states, see ``find_blocks``.

    Returns:
        The dense part, see ``drop_tables``; the blocks; and the plain tensors in the dense part of
        the optimizers.

    Raises:
        UnsupportedState: see ``find_blocks``.
    """
    dense: dict[str, Any] = {}
    plain: list[torch.Tensor] = []
    sharded: list[tuple[Path, Any]] = []
    for name, value in live.items():
        walk = _Walk(stored, sharded)
        dense[name] = walk.dense(value, (name,))
        if name in optimizers:
            plain += walk.plain
        else:
            dense[name] = walk.marked(dense[name])
    return dense, [b for b in _blocks(sharded, stored, optimizers) if not b.replica], plain


def drop_tables(value: Any, stored: StoredTables, of_object: bool = False) -> Any:
    """Copy a state dict without sharded leaves (see ``find_blocks``) and data-parallel tables.

    Entries of the tables' optimizers are left out as well. In lists and tuples None takes their
    place. An object's is marked as ``Whole`` if it is.
    """
    walk = _Walk(stored, [])
    found = walk.dense(value, ())
    return walk.marked(found) if of_object else found


class _Walk:
    """A walk over a live state, which copies its dense part.

    Attributes:
        sharded: the sharded leaves that were left out, each with its path.
        plain: the tensors in the copy.
    """

    def __init__(self, stored: StoredTables, sharded: list[tuple[Path, Any]]) -> None:
        self._stored = stored
        self.sharded = sharded
        self.plain: list[torch.Tensor] = []
        self._whole = True

    def marked(self, found: Any) -> Any:
        """Return the dense part that ``dense`` has found, as ``Whole`` if it is that."""
        simple = (type(t) is torch.Tensor and t.is_cpu and not t.requires_grad for t in self.plain)
        return Whole(found) if self._whole and type(found) is dict and all(simple) else found

    def dense(self, value: Any, path: Path) -> Any:
        """Return a value's dense part, see ``drop_tables``."""
        if type(value) is dict and len(path) <= MOST_DEPTH:  # most values that come here
            return self._dict(value, path)
        if isinstance(value, SHARDED):
            self.sharded.append((path, value))
            self._whole = False
            return None
        if isinstance(value, torch.Tensor):
            self.plain.append(value)
        elif len(path) <= MOST_DEPTH and isinstance(value, dict):
            return self._dict(value, path)
        elif len(path) <= MOST_DEPTH and type(value) in (list, tuple, deque):
            items = enumerate(value)
            own = [v if type(v) in _SIMPLE else self.dense(v, (*path, at)) for at, v in items]
            return deque(own, value.maxlen) if type(value) is deque else type(value)(own)
        return value

    def _dict(self, value: dict[Any, Any], path: Path) -> dict[Any, Any]:
        kept = {}
        memory, storages = self._stored.memory, self._stored.memory.storages
        for key, item in value.items():
            kind = type(item)
            if kind in _SIMPLE:
                kept[key] = item
            elif kind is torch.Tensor or (
                kind is not dict
                and isinstance(item, torch.Tensor)
                and not isinstance(item, SHARDED)
            ):
                if not (
                    item.layout is torch.strided
                    and (kind is torch.Tensor or is_dense(item))
                    and item.untyped_storage().data_ptr() in storages
                    and item.numel()
                    and memory.cover(item)
                ):
                    kept[key] = item
                    self.plain.append(item)
            else:
                copied = self.dense(item, (*path, key))
                if copied is None and isinstance(item, SHARDED):
                    continue
                if not isinstance(item, dict) or copied or not self._stored.name(key):
                    kept[key] = copied
        if type(value) is not dict or len(kept) < len(value):  # a type comes from the live one
            self._whole = False
        of_module = hasattr(value, "_metadata")  # the most frequent one that is not plain
        return kept if type(value) is dict or of_module else like(value, kept)


def find_blocks(
    state_dict: dict[str, Any], stored: StoredTables, optimizers: Container[object] = ()
) -> list[Block]:
    """Find the local shards in a state dict that are not stored as table rows.

    Args:
        stored: the tables.
        optimizers: top-level keys of optimizers' state dicts: a sharded tensor there under a
            table's name is the table's state, even if its memory belongs to shards that have since
            moved to other ranks.

    Raises:
        UnsupportedState: a shard can't be stored, or has a table's name but not its memory.
    """
    return _blocks(leaves(state_dict, SHARDED), stored, optimizers)


def _blocks(
    sharded_leaves: Iterable[tuple[Path, Any]], stored: StoredTables, optimizers: Container[object]
) -> list[Block]:
    blocks = []
    for sharded in _described(each for each in sharded_leaves if not _is_rows(each[1], stored)):
        if sharded.placed is None and all(stored.holds(tensor) for _, tensor in sharded.shards):
            continue
        named = any(stored.name(key) for key in sharded.path[-2:])
        if named and sharded.path[0] in optimizers:
            continue
        if named and not is_step(sharded.path):
            raise UnsupportedState(
                f"{sharded.name} is not the memory of the table of that name that is tracked: "
                "track the model that is saved, and save one model at a time, or several as one "
                "nn.ModuleDict (if update_shards has resharded the table, make a new optimizer)"
            )
        layout, averaged = _layout(sharded.value), is_averaged(sharded.path, sharded.value)
        for part in sharded.parts():
            if part.box.volume or not math.prod(sharded.size):
                same = part.replica, part.elsewhere or averaged, averaged
                place = sharded.path, sharded.size, part.box
                blocks.append(Block(*place, part.tensor, layout, *same))
    return blocks


def find_shards(state_dict: dict[str, Any]) -> tuple[list[LocalShard], dict[str, TableShape]]:
    """Find the local shards in a state dict, weights joined with their fused optimizer state.

    Returns:
        This rank's shards, and the shapes of all tables. A table's name is its weight's own key
        without ``.weight``; keys above it don't count.

    Raises:
        UnsupportedState: a table's optimizer state is there without the table, or two tables have
            the same name.
    """
    found = [sharded for sharded in _sharded_tensors(state_dict) if sharded.placed is None]
    weights = {str(s.path[-1]): s for s in found if _is_weight(s)}
    if len(weights) != sum(_is_weight(s) for s in found):
        raise UnsupportedState(
            "two tables of the state dict have the same name: save one model at a time"
        )
    states: dict[str, dict[str, _Sharded]] = {name: {} for name in weights}
    for sharded in found:
        if _is_weight(sharded) or is_step(sharded.path):
            continue
        owner = str(sharded.path[-2]) if len(sharded.path) > 1 else ""
        if owner not in weights and not owner.endswith(WEIGHT):
            continue  # no table's state: see find_blocks
        if owner not in weights:
            raise UnsupportedState(
                f"{sharded.name} is sharded, but the state dict has no table weight {owner!r} that "
                "it could be the optimizer state of: save the model's state dict with it"
            )
        table = owner.removesuffix(WEIGHT).rsplit(".", 1)[-1]
        states[owner][str(sharded.path[-1]).removeprefix(f"{table}.")] = sharded
    shards = []
    tables = {}
    for key, weight in weights.items():
        name = key.removesuffix(WEIGHT)
        tables[name] = TableShape(*weight.size)
        shards += _join(name, tables[name], weight, states[key])
    return shards, tables


def _is_weight(sharded: _Sharded) -> bool:
    return len(sharded.size) == 2 and str(sharded.path[-1]).endswith(WEIGHT)


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


def plain_targets(value: Any, paths: Container[Path]) -> list[Block]:
    """Find the plain tensors of a state dict that are to be restored from blocks.

    Args:
        paths: paths of the tensors that a checkpoint has as blocks.
    """
    return [
        Block(path, tuple(leaf.shape), Box.whole(leaf.shape), leaf.detach())
        for path, leaf in leaves(value, (torch.Tensor,))
        if path in paths and not isinstance(leaf, SHARDED)
    ]


def write_whole(value: Any, whole: torch.Tensor) -> None:
    """Write a plain tensor into the local parts of a sharded one of the same shape."""
    for sharded in _sharded_tensors(value):
        for part in sharded.parts():
            part.tensor.copy_(whole[part.box.slices(Box.whole(whole.shape))])


def _is_rows(value: Any, stored: StoredTables) -> bool:
    """Return whether a ShardedTensor is table rows, which are most of a state dict's."""
    return isinstance(value, ShardedTensor) and all(
        stored.holds(shard.tensor) for shard in value.local_shards()
    )


def _sharded_tensors(state_dict: Any) -> Iterator[_Sharded]:
    return _described(leaves(state_dict, SHARDED))


def _described(found: Iterable[tuple[Path, Any]]) -> Iterator[_Sharded]:
    for path, leaf in found:
        # A ShardedTensor's own size() goes through torch's dispatcher: ten times as slow.
        size = tuple(leaf.metadata().size if isinstance(leaf, ShardedTensor) else leaf.size())
        shards: list[tuple[tuple[int, ...], torch.Tensor]] = []
        placed = None
        if isinstance(leaf, ShardedTensor):
            for shard in leaf.local_shards():
                shards.append((tuple(shard.metadata.shard_offsets), shard.tensor.detach()))
        elif isinstance(local := leaf._local_tensor, LocalShardsWrapper):
            # A rank without a shard still has an offset.
            for offset, tensor in zip(local.local_offsets(), local.local_shards(), strict=False):
                shards.append((tuple(offset), tensor.detach()))
        else:
            placed = local_parts(leaf, name_of(path))
        yield _Sharded(path, size, leaf, shards, placed)


def _layout(value: Any) -> tuple[Span, ...] | None:
    """Return the rows of a ShardedTensor's shards on all ranks; None for a DTensor."""
    if not isinstance(value, ShardedTensor):
        return None
    shards = value.metadata().shards_metadata
    rows = {(s.shard_offsets[0], s.shard_offsets[0] + s.shard_sizes[0]) for s in shards}
    return tuple(sorted(rows))
