"""Restore state objects from the trees of a chain's head, checked before any change.

A per-rank state comes from the same rank's chunk; on another number of ranks the states of all
ranks are merged by a function of the user's. Values that blocks or rows restore in place stay in
the live state dict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.dense.state_dicts import own_state_dict
from torchrec_checknrun.dense.state_objects import StateObjects
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import Path, decode_state_chunk
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.state_dict import MODEL, StoredTables, write_whole
from torchrec_checknrun.restore.blocks import SavedBlocks
from torchrec_checknrun.restore.chunks import ChainContent
from torchrec_checknrun.restore.content_tree import (
    conversions,
    require_members,
    tensor_paths,
    with_blocks,
    with_names,
)
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.model_loading import (
    of_fixed_shape,
    other_extra_states,
    require_taken,
)
from torchrec_checknrun.restore.state_fit import check_state, common_state, merge_state
from torchrec_checknrun.values.buffers import BUFFERS, PerRankBuffers
from torchrec_checknrun.values.state import Tree, is_sharded, tree_items

logger = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})
_NO_TABLES = StoredTables((), ())
Merge = Callable[[list[Any]], Any]
"""Makes one rank's state from the saved states of all ranks (in rank order), for another number of
ranks.
"""


@dataclass(frozen=True)
class Owners:
    """The owners of state beside the tables, which take their content in ways of their own.

    Attributes:
        merges: merge functions of states of which each rank has its own, by name, for another
            number of ranks; None or absent: such a state is an error on another number of ranks.
        optimizers: the dense optimizers among the state objects, which are fitted to the
            checkpoint; the caller gives them their restored state, and then the tables' progress.
            None: unknown, they must have made their state already.
        buffers: the model's buffers of which each rank has its own.
        objects: state objects that are given whole what they saved; other states must fit the live
            ones.
        model: the model, if more than its tables is restored.
        of_some: names of the model's tensors that some ranks have, and others lack.
    """

    merges: Mapping[str, Merge | None] = field(default_factory=dict)
    optimizers: DenseStates | None = None
    buffers: PerRankBuffers = field(default_factory=PerRankBuffers)
    objects: StateObjects = field(default_factory=lambda: StateObjects({}))
    model: nn.Module | None = None
    of_some: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SavedStates:
    """The states of one checkpoint, or of what takes its place.

    Attributes:
        id: its name in errors.
        world_size: number of ranks that it was saved by.
        per_rank: whether each rank has its own, by name.
        chunks: keys and trees, by name and by rank; None for a state of all ranks.
    """

    id: str
    world_size: int
    per_rank: Mapping[str, bool]
    chunks: Mapping[str, Mapping[int | None, tuple[str, Tree]]]

    @classmethod
    def of(cls, content: ChainContent) -> SavedStates:
        """Return the states of a chain's head."""
        head = content.head
        chunks: dict[str, dict[int | None, tuple[str, Tree]]] = {}
        for chunk in content.chunks[-1]:
            if isinstance(entry := chunk.entry, StateEntry):
                chunks.setdefault(entry.name, {})[entry.rank] = chunk.key, entry.tree
        return cls(head.id, head.world_size, head.states, chunks)


def present_states(
    states: Mapping[str, Stateful],
    optimizers: DenseStates,
    saved: SavedStates,
    needed: Collection[str] = (),
) -> dict[str, Any]:
    """Return the present state dicts of state objects by name, of those that need none an empty
    one; see ``StateObjects.needs_present``.

    Args:
        optimizers: the dense optimizers among them.
        saved: the states to restore.
        needed: names of more objects whose state dicts are needed.
    """
    objects = StateObjects({name: s for name, s in states.items() if name not in optimizers})
    found = {}
    for name in sorted(states):  # the same order on all ranks
        trees = [tree for _, tree in saved.chunks.get(name, {}).values()]
        found[name] = (
            objects.present(name, trees, name in needed)
            if name in objects
            else own_state_dict(states[name])
        )
    return found


def needed_states(
    states: Mapping[str, Stateful], optimizers: DenseStates, saved: SavedStates
) -> set[str]:
    """Return the names of the objects whose present state dicts are needed; see
    ``present_states``.
    """
    objects = StateObjects({name: s for name, s in states.items() if name not in optimizers})
    trees = {name: [tree for _, tree in saved.chunks.get(name, {}).values()] for name in states}
    return {n for n in states if n in objects and objects.needs_present(n, trees[n])}


class StateRestore:
    """A restore of state objects: call ``plan``, then ``load`` for each chunk.

    Args:
        states: the saved states.
        state_dict: the live state dict, whose values are replaced by restored ones.
        saved: the checkpoint's sharded tensors.
        fit: allowed differences between checkpoint and state dict.
        owners: of the states.

    Attributes:
        skipped: descriptions of states and values on one side only.
    """

    def __init__(
        self,
        states: SavedStates,
        state_dict: dict[str, Any],
        saved: SavedBlocks,
        fit: Fit,
        owners: Owners,
    ) -> None:
        self._head = states
        self._state_dict = state_dict
        self._saved = saved
        self._fit = fit
        self._merges = dict(owners.merges)
        self._objects, self._optimizers = owners.objects, owners.optimizers
        self._buffers, self._model = owners.buffers, owners.model
        self._of_some = owners.of_some
        self._rank, self._world = 0, 1
        if dist.is_initialized():
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._chunks = dict(states.chunks)
        self._model_content: dict[str, Any] | None = None
        self._read: dict[str, list[Any]] = {}
        self._by_blocks: frozenset[int] = frozenset()
        self._from_trees: frozenset[int] = frozenset()
        self._stored = _NO_TABLES
        self.skipped: list[str] = []

    def fit_optimizers(
        self, tables: Mapping[str, RowForms | None], renamed: Mapping[str, str] = _NONE
    ) -> None:
        """Fit the dense optimizers' live state to the checkpoint; see ``DenseStates.fit``.

        Args:
            tables: the optimizer states that are restored with rows, by the model's table; None: no
                rows are restored.
            renamed: the model's table by the saved one, where they differ.

        Raises:
            IncompatibleCheckpoint: an optimizer doesn't fit, or was saved by each of other ranks.
        """
        if self._optimizers is None:
            return
        for name, trees in self._chunks.items() if renamed else ():
            if name in self._optimizers:
                named = {r: (key, with_names(t, renamed)) for r, (key, t) in trees.items()}
                self._chunks[name] = named
        found = {}
        for name, by_rank in self._chunks.items():
            if name in self._optimizers and name in self._head.per_rank:
                self._saved_ranks(name)
            _, tree = by_rank.get(None) or by_rank.get(self._rank) or next(iter(by_rank.values()))
            found[name] = with_blocks(tree, name, self._saved)
        resized = self._head.world_size != self._world
        skipped = None if self._fit.strict else self.skipped
        self._state_dict.update(self._optimizers.fit(found, tables, skipped, resized))

    def split_buffers(self) -> None:
        """Move the buffers that were saved per rank from the model's state dict to one of their
        own, as in the checkpoint; ``join_buffers`` moves them back.
        """
        model = self._state_dict.get(MODEL)
        if not isinstance(model, dict) or BUFFERS not in self._head.per_rank:
            return
        names: dict[str | int, None] = {}
        for _, tree in self._chunks.get(BUFFERS, {}).values():
            names |= dict.fromkeys(tree_items(tree))
        self._model_content = model
        self._state_dict[MODEL] = {k: v for k, v in model.items() if k not in names}
        self._state_dict[BUFFERS] = {k: v for k, v in model.items() if k in names}
        if self._head.world_size != self._world:
            self._buffers.require_merges(list(map(str, names)), self._head.world_size, self._world)
            self._merges[BUFFERS] = self._buffers.merge

    def join_buffers(self) -> None:
        """Undo ``split_buffers``."""
        if self._model_content is not None:
            self._model_content.update(self._state_dict[MODEL])
            self._model_content.update(self._state_dict.pop(BUFFERS))
            self._state_dict[MODEL] = self._model_content

    def plain_paths(self) -> set[Path]:
        """Return the paths of all tensors that lie in the states' trees."""
        return {
            path
            for name, chunks in self._chunks.items()
            for _, tree in chunks.values()
            for path in tensor_paths(tree, (name,))
        }

    def plan(
        self, stored: StoredTables, by_blocks: frozenset[int], from_trees: frozenset[int]
    ) -> Iterator[str]:
        """Check the live states against the head's, and yield the keys of the chunks to read.

        Args:
            stored: the tables, whose rows are restored in place.
            by_blocks: ``id`` of each live tensor that is restored from blocks.
            from_trees: ``id`` of each live sharded tensor that is restored from a tree.

        Raises:
            IncompatibleCheckpoint: a state doesn't fit; names the key, the saved and the live one.
            CorruptCheckpoint: a chunk is missing.
        """
        self._stored, self._by_blocks, self._from_trees = stored, by_blocks, from_trees
        head = self._head
        own = self._chunks.keys() & self._state_dict.keys()
        require_members({n: [tree for _, tree in self._chunks[n].values()] for n in sorted(own)})
        for name, current in self._state_dict.items():
            plain = name in head.per_rank or not is_sharded(current)
            if (name,) in self._saved or (stored.covers(current) and not plain):
                continue
            if name not in head.per_rank and not self._fit.strict:
                self.skipped.append(f"state {name!r}: not in the checkpoint")
                continue
            if name not in head.per_rank:
                raise IncompatibleCheckpoint(
                    f"{head.id} has no state {name!r} (it has {sorted(head.per_rank)}): restore "
                    "with the state objects it was saved with, or keep what it holds now with "
                    "strict=False"
                )
            saved_ranks = self._saved_ranks(name)
            for rank in saved_ranks:
                if rank not in self._chunks.get(name, {}):
                    raise CorruptCheckpoint(f"{head.id} lacks state {name!r} of rank {rank}")
                key, tree = self._chunks[name][rank]
                if self._fit.strict and (len(saved_ranks) == 1 or name == BUFFERS):
                    self._check(name, current, with_blocks(tree, name, self._saved))
                yield key

    def load(self, entry: StateEntry, payload: memoryview, dry_run: bool) -> None:
        """Put a chunk's state into the live state dict.

        Args:
            dry_run: decode the chunk, but change nothing.
        """
        _, tree = self._chunks[entry.name][entry.rank]  # of an optimizer: with the model's names
        value = decode_state_chunk(replace(entry, tree=tree), payload)
        if not dry_run:
            self.put(entry.name, value)

    def put(self, name: str, value: Any) -> None:
        """Put a saved state, decoded, into the live state dict."""
        head = self._head
        read = self._read.setdefault(name, [])
        read.append(value)
        merge = self._merges.get(name)
        if head.per_rank[name] and head.world_size != self._world and merge is not None:
            if len(read) < head.world_size:
                return
            value = merge(read)
        current = self._state_dict[name]
        if name == MODEL and self._of_some:
            value = {k: v for k, v in value.items() if k in current or k not in self._of_some}
        if name in self._objects:
            self._state_dict[name] = self._objects.content(
                name,
                current,
                value,
                self._kept,
                self._in_place,
                self._stored.name,
                self._fit.strict,
                self.skipped,
            )
            return
        # Whole, not by key: a module may show its own object.
        extra = {k: v for k, v in other_extra_states(value).items() if name == MODEL}
        if not self._fit.strict:
            value = common_state(
                current, value, name, self.skipped, self._comes_elsewhere, self._stored.name
            )
            extra = {k: v for k, v in extra.items() if k in current}
        rest = {k: v for k, v in value.items() if k not in extra} if extra else value
        merged = merge_state(current, rest, self._stored.name, self._kept)
        if extra:
            merged.update(extra)
        self._state_dict[name] = merged

    def _saved_ranks(self, name: str) -> Sequence[int | None]:
        """Return the ranks whose chunks of a state are needed; None stands for all ranks."""
        head = self._head
        if not head.per_rank[name]:
            return [None]
        if head.world_size == self._world:
            return [self._rank]
        if self._merges.get(name) is None:
            raise IncompatibleCheckpoint(
                f"state {name!r} was saved per rank on {head.world_size} ranks, and there are "
                f"{self._world} now: declare it PerRank(…, merge=function), or restore on "
                f"{head.world_size} ranks"
            )
        return range(head.world_size)

    def _check(self, name: str, current: Any, tree: Tree) -> None:
        """Refuse a saved state that doesn't fit the live one; warn of converted floats."""
        if name in self._objects:
            self._objects.check(name, current, tree, self._stored.covers)
            return
        if names := list(conversions(current, tree, name)):
            logger.warning(
                "%s: %d tensors were saved as another type of float, and are converted: %s%s",
                self._head.id,
                len(names),
                ", ".join(names[:4]),
                ", …" if len(names) > 4 else "",
            )
        covers, of_table = self._stored.covers, self._stored.name
        exact = self._optimizers is not None and name in self._optimizers
        if name in (MODEL, BUFFERS):
            saved = tree_items(tree)
            if name == MODEL:
                require_taken(self._model, saved.keys() - current.keys() - self._of_some)
            current = of_fixed_shape(self._model, current, saved)
        check_state(current, tree, name, covers, of_table, exact)

    def _kept(self, current: Any, saved: Any) -> bool:
        """Return whether a live value stays where a saved state is merged into it: blocks or rows
        restore it, or it is sharded and gets its parts of a plain tensor here.
        """
        if id(current) in self._from_trees and isinstance(saved, torch.Tensor):
            write_whole(current, saved)
        return id(current) in self._by_blocks or is_sharded(current)

    def _comes_elsewhere(self, current: object) -> bool:
        """Return whether a live value is restored from other chunks than its state's."""
        return self._kept(current, None) or self._stored.covers(current)

    def _in_place(self, current: object) -> bool:
        """Return whether a live value is restored in place, from rows or blocks."""
        return id(current) in self._by_blocks or self._stored.covers(current)
