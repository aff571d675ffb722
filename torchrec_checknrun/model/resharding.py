"""Marks that follow their rows when shards move between the ranks of a running job.

TorchRec's dynamic resharding (``update_shards``) replaces all kernels of a collection, and a hook
on a kernel goes with it. Here is what it takes to go on exactly: to hear of it, to know whether
rows were cut into other columns, and to carry a byte per row from the old shards to the new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_checknrun.model.kernels import embedding_collections
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.shards import LocalShard, Rectangle

Around = Callable[[dist.ProcessGroup | None], AbstractContextManager[None]]
"""What surrounds the moving of shards; given the group of the ranks that hold them."""
Place = tuple[str, Rectangle]
"""A part of a table: the table's full name, and which rows and columns."""


class Collections:
    """The sharded collections of a model: whether they are sharded anew, and into which columns.

    Args:
        model: TorchRec's collections are under it.
        around: called whenever one of them is sharded anew by ``update_shards``, on all ranks.
    """

    def __init__(self, model: nn.Module, around: Around) -> None:
        self._model = model
        self._around = around
        self._stop: dict[nn.Module, Callable[[], None]] = {}
        self._known: dict[int, tuple[object, frozenset[tuple[int, int]]]] = {}
        """Sharding specs that were looked at, by id: one has a part for every rank."""
        self._columns = self._column_ranges()
        self._closed = False

    def changed(self) -> bool:
        """Looks for the collections again: whether any table has other column ranges than when this
        was called last. Every rank finds the same.
        """
        found = [collection for _, collection in embedding_collections(self._model)]
        for collection in self._stop.keys() - set(found):
            self._stop.pop(collection)()
        for collection in found:
            known = collection in self._stop or self._closed
            if not known and hasattr(collection, "update_shards"):
                self._stop[collection] = _Resharding.surround(collection, self._look_again)
        before, self._columns = self._columns, self._column_ranges()
        return before != self._columns

    def close(self) -> None:
        """Gives the collections their own ``update_shards`` back."""
        self._closed = True
        for stop in self._stop.values():
            stop()
        self._stop.clear()

    @contextmanager
    def _look_again(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        self._known.clear()  # a spec may be changed in place
        with self._around(group):
            yield

    def _column_ranges(self) -> dict[str, frozenset[tuple[int, int]]]:
        """By table, where its shards' columns begin and end; nothing for a data-parallel table. By
        the sharding plan, and so the same on all ranks.
        """
        found = {}
        for prefix, collection in embedding_collections(self._model):
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


class _Resharding:
    """Stands in front of one collection's ``update_shards``, for all who track the collection."""

    def __init__(self, collection: Any) -> None:
        self._update_shards: Callable[..., None] = collection.update_shards
        self._around: list[Around] = []

    def __call__(
        self, changed_sharding_params: Mapping[str, Any], env: Any, device: torch.device | None
    ) -> None:
        """TorchRec's ``update_shards``, of the same arguments."""
        with ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(env.process_group))
            self._update_shards(changed_sharding_params, env, device)

    @classmethod
    def surround(cls, collection: Any, around: Around) -> Callable[[], None]:
        """Puts ``around`` around it from now on.

        Returns:
            What ends that; after the last one the collection has its own method again.
        """
        found = vars(collection).get("update_shards")
        resharding = found if isinstance(found, cls) else cls(collection)
        collection.update_shards = resharding
        resharding._around.append(around)

        def stop() -> None:
            resharding._around.remove(around)
            if not resharding._around:
                del collection.update_shards

        return stop


def all_states_moved(shards: Sequence[LocalShard]) -> bool:
    """Whether TorchRec moves the optimizer state of a rank's part of a collection along.

    It knows one state per table, ``momentum1``, and gives up on all if one table has none.
    """
    return {tuple(shard.optimizer) for shard in shards} in (set(), {()}, {("momentum1",)})


@dataclass(frozen=True)
class Part:
    """Bytes of a part of a table, one for each row ``(rows,)`` uint8, on any device."""

    place: Place
    bytes: torch.Tensor

    def rows(self, common: Rectangle) -> torch.Tensor:
        """A view of those of some rows that are in it."""
        start = self.place[1].row_start
        return self.bytes[common.row_start - start : common.row_stop - start]

    def add(self, common: Rectangle, values: torch.Tensor) -> None:
        """ORs bytes of those rows into it."""
        self.rows(common).bitwise_or_(values.to(self.bytes.device))


def carry(held: Sequence[Part], wanted: Sequence[Part], ranks: Ranks) -> list[int]:
    """ORs what was held into what is wanted, wherever they have rows of a column in common.

    A collective. Parts that stay where they were are nothing to the other ranks; of the others each
    byte goes from the rank that held it to those that want it, at most one per row and overlapping
    column range.

    Args:
        held: bytes of this rank's old shards.
        wanted: of its new ones, changed in place.
        ranks: those that hold the tables.

    Returns:
        Which of the wanted parts, by index, nobody held, or not the whole of them.
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
        # Both sides go through the same pairs, so that the tags of their messages are the same.
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


def _places(parts: Iterable[Part]) -> list[Place]:
    return [part.place for part in parts]


def _overlaps(
    held: Sequence[Place], wanted: Sequence[Place]
) -> Iterator[tuple[int, int, Rectangle]]:
    """Pairs of parts, by index, that have a block in common, and that block."""
    of_table: dict[str, list[int]] = {}
    for j, (table, _) in enumerate(wanted):
        of_table.setdefault(table, []).append(j)
    for i, (table, rectangle) in enumerate(held):
        for j in of_table.get(table, ()):
            common = rectangle.intersect(wanted[j][1])
            if common is not None:
                yield i, j, common
