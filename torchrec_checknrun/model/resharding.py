"""Carry marks with their rows when shards move between the ranks of a running job.

TorchRec's dynamic resharding (``update_shards``) replaces all kernels of a collection, and the
hooks on them are lost. ``Collections`` notices the call and tells whether rows were cut into other
columns; ``carry`` moves a byte per row from the old shards to the new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.model.hooks import surround
from torchrec_checknrun.model.module_tree import embedding_collections
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.shards import LocalShard, Rectangle

Around = Callable[[dist.ProcessGroup | None], AbstractContextManager[None]]
"""A context that surrounds the moving of shards, given the group of the ranks that hold them."""
Place = tuple[str, Rectangle]
"""A part of a table: the table's full name, and its rows and columns."""


class Collections:
    """The sharded collections of a model, and the column ranges of their tables.

    Args:
        model: contains TorchRec's collections.
        around: surrounds every ``update_shards`` of a collection, on all ranks.
    """

    def __init__(self, model: nn.Module, around: Around) -> None:
        self._around = around
        self._stop: dict[nn.Module, Callable[[], None]] = {}
        self._known: dict[int, tuple[object, frozenset[tuple[int, int]]]] = {}
        """Column ranges by id of a sharding spec, which is slow to read: it has a part per rank."""
        self._columns = self._column_ranges(embedding_collections(model))
        self._closed = False

    def changed(self, present: Sequence[tuple[str, Any]]) -> bool:
        """Follow the collections; return whether any table's column ranges have changed.

        Changed since the last call, that is. Every rank returns the same.

        Args:
            present: the model's collections now, as ``embedding_collections`` finds them.
        """
        found = [collection for _, collection in present]
        for collection in self._stop.keys() - set(found):
            self._stop.pop(collection)()
        for collection in found:
            if collection not in self._stop and not self._closed:
                self._stop[collection] = surround(collection, "update_shards", self._look_again)
        before, self._columns = self._columns, self._column_ranges(present)
        return before != self._columns

    def close(self) -> None:
        """Restore the collections' own ``update_shards``."""
        self._closed = True
        for stop in self._stop.values():
            stop()
        self._stop.clear()

    @contextmanager
    def _look_again(
        self, changed_sharding_params: object, env: ShardingEnv, device: torch.device | None
    ) -> Iterator[None]:
        """Surround TorchRec's ``update_shards``, whose arguments these are."""
        self._known.clear()  # a spec may be changed in place
        with self._around(env.process_group):
            yield

    def _column_ranges(
        self, collections: Iterable[tuple[str, Any]]
    ) -> dict[str, frozenset[tuple[int, int]]]:
        """Return the columns at which shards begin and end, by table; none if data-parallel.

        The sharding plan tells, so all ranks return the same.
        """
        found = {}
        for prefix, collection in collections:
            for name, sharding in collection.module_sharding_plan.items():
                spec = sharding.sharding_spec
                if id(spec) not in self._known:
                    columns = frozenset(
                        (shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1])
                        for shard in getattr(spec, "shards", ())
                    )
                    self._known[id(spec)] = spec, columns
                found[prefix + name] = self._known[id(spec)][1]
        return found


def all_states_moved(shards: Sequence[LocalShard]) -> bool:
    """Return whether TorchRec moves the optimizer state along with these shards of one rank.

    TorchRec moves one state per table, ``momentum1``, and none at all if one table has none.
    """
    return {tuple(shard.optimizer) for shard in shards} in (set(), {()}, {("momentum1",)})


@dataclass(frozen=True)
class Part:
    """One byte for each row of a part of a table, ``(rows,)`` uint8 on any device."""

    place: Place
    bytes: torch.Tensor

    def rows(self, common: Rectangle) -> torch.Tensor:
        """Return a view of the bytes of some of the part's rows."""
        start = self.place[1].row_start
        return self.bytes[common.row_start - start : common.row_stop - start]

    def add(self, common: Rectangle, values: torch.Tensor) -> None:
        """OR bytes into those of some of the part's rows."""
        self.rows(common).bitwise_or_(values.to(self.bytes.device))


def carry_marks(
    gone: Sequence[TrackedShard], new: Sequence[TrackedShard], ranks: Ranks, all_known: bool
) -> None:
    """Mark the rows of new shards as they were marked in the old ones; a collective.

    Args:
        gone, new: this rank's old and new shards.
        all_known: whether TorchRec has moved all optimizer state along, on all ranks. If not, all
            rows are marked; if so, only rows that no rank held.
    """
    unknown = carry(
        [Part(_place(shard), shard.marks.everything()) for shard in gone],
        [Part(_place(shard), shard.marks.live) for shard in new],
        ranks,
    )
    for i in unknown if all_known else range(len(new)):
        new[i].mark_all()


def carry_cuts(
    gone: Sequence[TrackedShard],
    new: Sequence[TrackedShard],
    ranks: Ranks,
    cuts: Mapping[int, Cut],
    held: Sequence[frozenset[int]],
) -> None:
    """Move the rows of cuts to the new shards; a collective.

    A cut that some ranks no longer hold might never be merged there: its rows are marked at once.

    Args:
        gone, new: as for ``carry_marks``.
        cuts: this rank's open cuts, by number.
        held: numbers of the open cuts of each rank.
    """
    for number in sorted(frozenset().union(*held)):
        cut = cuts.get(number, Cut(number, Consumer(0)))
        pending = {shard.marks: torch.zeros_like(shard.marks.live) for shard in new}
        carry(
            [Part(_place(shard), cut.bytes(shard.marks)) for shard in gone],
            [Part(_place(shard), pending[shard.marks]) for shard in new],
            ranks,
        )
        if all(number in numbers for numbers in held):
            cut.move([shard.marks for shard in gone], pending)
            continue
        for marks, taken in pending.items():
            marks.live.bitwise_or_(taken)


def carry(held: Sequence[Part], wanted: Sequence[Part], ranks: Ranks) -> list[int]:
    """OR held bytes into wanted ones, wherever the parts have rows of a column in common.

    A collective. Parts that stay on their rank concern no other rank. Each byte of any other part
    goes from the rank that held it to those that want it, at most once per overlapping column
    range.

    Args:
        held: bytes of this rank's old shards.
        wanted: bytes of this rank's new shards, changed in place.
        ranks: the ranks that hold the tables.

    Returns:
        Indices of the wanted parts that the held ones, on all ranks, don't cover completely.
    """
    for i, j, common in _overlaps(_places(held), _places(wanted)):
        wanted[j].add(common, held[i].rows(common))
    stay = set(_places(held)) & set(_places(wanted))
    going = [part for part in held if part.place not in stay]
    coming = [part for part in wanted if part.place not in stay]
    everyone = ranks.gather((_places(going), _places(coming)))
    on_device = ranks.group is not None and dist.get_backend(ranks.group) == "nccl"
    operations: list[dist.P2POp] = []
    received: list[tuple[Part, Rectangle, torch.Tensor]] = []
    for peer, (peer_held, peer_wanted) in enumerate(everyone):
        if peer == ranks.rank:
            continue
        # Both sides walk the same pairs in the same order, so their messages' tags agree.
        for tag, (i, _, common) in enumerate(_overlaps(_places(going), peer_wanted)):
            rows = going[i].rows(common)
            message = rows if on_device else rows.cpu()
            operations.append(dist.P2POp(dist.isend, message, None, ranks.group, tag, peer))
        for tag, (_, j, common) in enumerate(_overlaps(peer_held, _places(coming))):
            device = coming[j].bytes.device if on_device else "cpu"
            message = torch.empty(common.rows, dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, message, None, ranks.group, tag, peer))
            received.append((coming[j], common, message))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for part, common, message in received:
        part.add(common, message)
    held_anywhere = [place for peer_held, _ in everyone for place in peer_held]
    left = {j: part.place[1].area for j, part in enumerate(wanted) if part.place not in stay}
    for _, j, common in _overlaps(held_anywhere, _places(wanted)):
        if j in left:
            left[j] -= common.area
    return [j for j, area in left.items() if area > 0]


def _place(shard: TrackedShard) -> Place:
    return shard.table, shard.rectangle


def _places(parts: Iterable[Part]) -> list[Place]:
    return [part.place for part in parts]


def _overlaps(
    held: Sequence[Place], wanted: Sequence[Place]
) -> Iterator[tuple[int, int, Rectangle]]:
    """Yield the pairs of parts, by index, that have a block in common, and that block."""
    of_table: dict[str, list[int]] = {}
    for j, (table, _) in enumerate(wanted):
        of_table.setdefault(table, []).append(j)
    for i, (table, rectangle) in enumerate(held):
        for j in of_table.get(table, ()):
            common = rectangle.intersect(wanted[j][1])
            if common is not None:
                yield i, j, common
