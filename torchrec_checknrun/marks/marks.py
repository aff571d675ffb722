"""Mark the rows that training changes: one byte per row, one bit per consumer.

A row is marked when the backward pass reaches its kernel, where the fused optimizer updates the
row, and when its id is evicted, which resets the row. A mark set in the forward pass, as in the
paper (Check-N-Run, section 4.1), would be lost with pipelines that look up the next batch before
the current one is applied, and evaluation would mark rows that nothing changes. Marking stores a
constant at the looked-up ids: no atomics, no growth.

A checkpoint's cut freezes the live bytes as a ``Layer`` and goes on with zeroed ones, in constant
time. A shard's marks are the live bytes and all layers, each for the consumers that still count
it. Behind training, ``consolidate`` turns layers into packed bits and their memory into the zeroed
bytes of the next cut. So a row takes 1 byte for live marks, from the first cut on 1 byte for the
next, and a bit for the layers that are settled; up to 3 bits where consumers differ, and as much
for each open cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchrec_checknrun.marks.gpu_streams import keep_until_used
from torchrec_checknrun.marks.intervals import KeptMarks
from torchrec_checknrun.marks.layers import NAMED, Consumer, Fate, Layer, Selected, Share, add_rows
from torchrec_checknrun.marks.untouched_rows import UntouchedRows
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.shards import LocalShard

_FEW_IDS = 4096
"""Number of pending ids that are kept as a list even for a table with fewer rows."""
_MOST_LAYERS = 16
"""Layers at which a cut consolidates by itself, as nothing else seems to do it."""
_MOST_SAMPLED = 8
"""Tables of a kernel of which rows are sampled, the largest ones: it takes training's time."""


class _State(NamedTuple):
    """Live marks and frozen ones: one value, lest an interrupt leave rows in both or in none."""

    live: torch.Tensor
    layers: tuple[Layer, ...]


class Marks:
    """The marks of one local shard, on the device of its weight.

    Only the training thread marks, cuts, clears and gives back; any thread may ``consolidate``.
    The training thread never waits for its passes over the rows.

    Args:
        rows: number of rows of the shard.

    Attributes:
        rows: as given.
        device: device of the shard's weight.
        kept: what outlives the process of all this; None: nothing.
        noted: told of the rows of each update, once for each lookup; None: nobody is.
        untouched: a sample of rows that nothing seems to change; None: there is none.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.device = device
        self.kept: KeptMarks | None = None
        self.noted: Callable[[torch.Tensor], object] | None = None
        self.untouched: UntouchedRows | None = None
        self._state = _State(self._zeros(), ())
        self._spare: torch.Tensor | None = None
        self._lock = threading.Lock()  # only ever for as long as it takes to look at each layer
        self._consolidating = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, as a copy of a tracked model does: marks of their own, without open cuts."""
        return _copied, (self.everything(),)

    @property
    def live(self) -> torch.Tensor:
        """Return the marks since the last cut, ``(rows,)`` uint8, which may be changed."""
        return self._state.live[: self.rows]

    @property
    def padded(self) -> torch.Tensor:
        """Return the live marks with the byte behind them, ``(rows + 1,)``."""
        return self._state.live

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the frozen marks, older than the live ones."""
        return self._state.layers

    def mark(self, ids: torch.Tensor, keep: bool = True) -> None:
        """Mark rows for every consumer.

        Args:
            ids: shard-local, ``(n,)`` of any integer dtype, in any order, repeated or not.
            keep: whether ``kept`` is to be told, which a journal does by itself.
        """
        if ids.numel() == 0 or self.rows == 0:
            return
        if ids.is_cuda or ids.dtype != torch.int64:
            # FBGEMM corrects out-of-range ids to row 0, but in its own int64 copy.
            ids = ids.to(torch.int64)
            ids = torch.where(
                ids == -1, self.rows, torch.where((ids < 0) | (ids >= self.rows), 0, ids)
            )
        if keep and self.kept is not None:
            self.kept.mark(ids)
        self._state.live.index_fill_(0, ids, int(Consumer.EVERY))
        if self.noted is not None:
            self.noted(ids[(ids >= 0) & (ids < self.rows)])

    def mark_all(self) -> None:
        """Mark every row for every consumer."""
        if self.kept is not None:
            self.kept.mark_all()
        self._state.live.fill_(int(Consumer.EVERY))

    def add(self, ids: torch.Tensor, consumer: Consumer) -> None:
        """Mark sorted distinct shard-local ``ids`` for one consumer only."""
        ids, live = ids.to(self.device), self.live
        if self.kept is not None:
            self.kept.mark(ids)
        live[ids] = live[ids] | int(consumer)

    def merge(self, rows: RowSet, consumer: Consumer) -> None:
        """Mark a set of rows for one consumer only."""
        add_rows(self.live, rows, consumer)

    def everything(self, consumers: int = Consumer.EVERY) -> torch.Tensor:
        """Return a copy of the consumers' marks, live and frozen, ``(rows,)`` uint8."""
        found = self.live.bitwise_and(int(consumers))
        for layer, bits in self._counting(int(consumers)):
            layer.add_to(found, bits)
        return found

    def modified(self, consumer: Consumer) -> torch.Tensor:
        """Return a copy of the consumer's marks, ``(rows,)`` bool."""
        return self.everything(consumer) != 0

    def any(self, consumer: Consumer) -> bool:
        """Return whether any row is marked for the consumer."""
        return bool(self.live.bitwise_and(int(consumer)).any()) or any(
            layer.any(bits) for layer, bits in self._counting(int(consumer))
        )

    def all_marked(self) -> bool:
        """Return whether every row is marked for every consumer."""
        wanted = sum(NAMED)
        return bool((self.everything(wanted) == wanted).all())

    def clear(self, consumer: Consumer) -> None:
        """Clear the consumer's marks."""
        if self.untouched is not None:
            self.untouched.forget()
        with self._lock:
            for layer in self.layers:
                layer.bits &= ~int(consumer)
        self._state.live.bitwise_and_(int(Consumer.EVERY & ~consumer))

    def cut(self, share: Share) -> None:
        """Freeze the live marks as a layer, and take the marks of the share's consumers away.

        Args:
            share: empty; holds what is needed for ``give_back`` before anything is taken.
        """
        if len(self._state.layers) >= _MOST_LAYERS:
            self.consolidate()
        with self._lock:
            spare, self._spare = self._spare, None
            fresh = self._zeros() if spare is None else spare
            live, layers = self._state
            if self.noted is not None and not share.consumers & Consumer.LAST:
                fresh.bitwise_or_(live.bitwise_and(int(Consumer.PRIORITY)))  # no checkpoint's cut
            layers = (*layers, Layer(self.rows, live))
            self._state = _State(fresh, layers)
            self._take(share, layers)

    def adopt(self, frozen: torch.Tensor, share: Share) -> None:
        """Add marks that a cut took on other shards, as if it had taken them here.

        Args:
            frozen: ``(rows,)`` uint8 on the marks' device, not to be changed afterwards.
            share: empty, see ``cut``.
        """
        layer = Layer(self.rows, frozen)
        layer.bits = share.consumers
        with self._lock:
            self._state = _State(self._state.live, (*self.layers, layer))
            self._take(share, (layer,))

    def give_back(self, share: Share) -> None:
        """Mark the rows again that a cut took away, in addition to those marked since; where
        updates are noted, for the next priority save as well.
        """
        with self._lock:
            taken = share.taken()
            for layer, bits in taken:
                layer.bits |= bits
                layer.leave(share)
        for layer, bits in taken if self.noted is not None else ():
            if bits & Consumer.LAST:
                add_rows(self.live, layer.rows(Consumer.LAST), Consumer.PRIORITY)

    def hold(self, share: Share) -> None:
        """Keep the frozen marks apart from those that later cuts freeze, until ``drop`` or
        ``settle``. Nothing is taken away.

        Args:
            share: empty; of the consumers whose marks matter.
        """
        with self._lock:
            share.layers = tuple(
                (layer, layer.bits) for layer in self.layers if layer.bits & share.consumers
            )
            for layer, _ in share.layers:
                layer.take_part(share)

    def drop(self, share: Share) -> None:
        """Clear the consumers' marks that were frozen when ``hold`` was called, and only those."""
        with self._lock:
            for layer, _ in share.layers:
                layer.bits &= ~share.consumers
                layer.leave(share)

    def settle(self, share: Share) -> None:
        """Drop what a cut took away; its rows are durable."""
        with self._lock:
            for layer, _ in share.taken():
                layer.leave(share)

    def keep_spare(self) -> None:
        """Make the zeroed bytes for the next cut ahead of it, and touch their memory."""
        if self._spare is None:
            self._offer(self._zeros().zero_())

    def consolidate(self) -> None:
        """Pack the layers, unite those that share one fate, and zero bytes for the next cut.

        Passes over the rows: call this in a thread that training doesn't wait for. Does nothing
        while another thread does it.
        """
        if not self._consolidating.acquire(blocking=False):
            return
        try:
            layers = self.layers
            for layer in layers:
                layer.pack()
            self._unite()
            for layer in layers:
                self._recycle(layer)
        finally:
            self._consolidating.release()

    @staticmethod
    def _take(share: Share, layers: Sequence[Layer]) -> None:
        """Note the layers in the share, then take its consumers' bits, in this order."""
        share.layers = tuple([(layer, bits) for layer in layers if (bits := layer.bits)])
        taken = [layer for layer, bits in share.layers if bits & share.consumers]
        for layer in taken:
            layer.take_part(share)
        for layer in taken:
            layer.bits &= ~share.consumers

    def _counting(self, consumers: int) -> Selected:
        with self._lock:
            counting = ((layer, layer.bits & consumers) for layer in self.layers)
            return tuple((layer, bits) for layer, bits in counting if bits)

    def _unite(self) -> None:
        """Replace layers that share one fate by one each; drop those that count for nobody."""
        with self._lock:
            left = tuple(layer for layer in self.layers if layer.bits or layer.shares)
            self._state = _State(self._state.live, left)
            alike: dict[Fate, list[tuple[Layer, int]]] = {}
            for layer in left:
                alike.setdefault(layer.fate(), []).append((layer, layer.bits))
        for fate, old in alike.items():
            if len(old) > 1:
                self._replace(fate, old)

    def _replace(self, fate: Fate, old: Sequence[tuple[Layer, int]]) -> None:
        """Replace layers of one fate by their union, unless their marks change meanwhile."""
        taken = 0
        for _, bits in fate.shares:
            taken |= bits
        packed = {}
        for consumer in NAMED:
            sets = [layer.rows(consumer) for layer, bits in old if (bits | taken) & consumer]
            packed[consumer] = RowSet.union(sets, self.rows)
        united = Layer(self.rows, None, packed)
        united.bits = 0
        for _, bits in old:
            united.bits |= bits
        with self._lock:
            if any(layer.bits != bits or layer.fate() != fate for layer, bits in old):
                return  # marks were taken, cleared or given back: the next time, then
            gone = {layer for layer, _ in old}
            for share in old[0][0].shares:
                united.take_part(share)
                others = tuple(part for part in share.layers if part[0] not in gone)
                share.layers = (*others, (united, share.bits_of(old[0][0])))
            left = (layer for layer in self.layers if layer not in gone)
            self._state = _State(self._state.live, (united, *left))

    def _recycle(self, layer: Layer) -> None:
        """Make a layer's bytes those of the next cut, if nobody needs them."""
        frozen = layer.give_up()
        if frozen is None or len(frozen) != self.rows + 1 or self._spare is not None:
            return
        self._offer(frozen.zero_())

    def _offer(self, zeroed: torch.Tensor) -> None:
        if zeroed.is_cuda:  # the training thread's stream may be another one
            torch.cuda.current_stream(zeroed.device).synchronize()
        with self._lock:
            self._spare = zeroed

    def _zeros(self) -> torch.Tensor:
        # The extra byte takes the marks of pruned lookups (id -1 on a GPU); no consumer reads it.
        return torch.zeros(self.rows + 1, dtype=torch.uint8, device=self.device)


def marks_of(shards: Sequence[LocalShard], sampled: bool) -> list[Marks]:
    """Make the marks of one kernel's shards.

    Args:
        sampled: whether training changes no rows of theirs that it doesn't mark: then those of the
            largest ones that are in CPU memory are sampled.
    """
    marks = [Marks(shard.rectangle.rows, shard.weight.device) for shard in shards]
    together = sorted(zip(marks, shards, strict=True), key=lambda pair: -pair[0].rows)
    for own, shard in together[:_MOST_SAMPLED] if sampled else ():
        if own.rows and shard.weight.is_cpu:
            own.untouched = UntouchedRows(shard)
    return marks


def _copied(marks: torch.Tensor) -> Marks:
    copy = Marks(len(marks), marks.device)
    copy.live.copy_(marks)
    return copy


class PendingRows:
    """Rows of one local shard that the next optimizer step will change.

    Kept as ids while there are fewer of them than rows, and as marks beyond that.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ids: list[torch.Tensor] = []
        self._count = 0
        self._many: Marks | None = None

    def __bool__(self) -> bool:
        return bool(self._ids) or self._many is not None

    def add(self, ids: torch.Tensor) -> None:
        """Add shard-local ids, as for ``Marks.mark``; their memory must not change afterwards."""
        self._ids.append(ids)
        self._count += max(1, ids.numel())  # even an empty tensor takes memory
        if self._count > max(self._marks.rows, _FEW_IDS):
            if self._many is None:
                self._many = Marks(self._marks.rows, self._marks.device)
            self._mark_into(self._many)

    def mark(self) -> None:
        """Mark the pending rows for every consumer, and forget them."""
        if self._many is not None:
            if self._marks.kept is not None:
                self._marks.kept.add(self._many.live != 0)
            self._marks.live.bitwise_or_(self._many.live)
            keep_until_used(self._many.live)
            self._many = None
        self._mark_into(self._marks)

    def _mark_into(self, marks: Marks) -> None:
        for ids in self._ids:
            marks.mark(ids)
            keep_until_used(ids)
        self._ids, self._count = [], 0
