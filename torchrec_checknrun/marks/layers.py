"""Hold the marks that a cut has frozen: a layer per cut of a shard's marks.

A layer's content never changes; only the consumers for which its rows count do. Bytes become bits,
one set of rows per consumer, on the thread that first asks for them. Once all sets are packed, and
nobody holds the bytes, their memory can be used again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch

from torchrec_checknrun.marks.gpu_streams import wait_for
from torchrec_checknrun.row_sets import RowSet


class Consumer(IntFlag):
    """A user of marks; each has a bit of its own and clears only that."""

    LAST = 1
    """Rows modified since the last checkpoint."""
    BASELINE = 2
    """Rows modified since the last full checkpoint."""
    USER = 4
    """Free for users of ``track`` without a Checkpointer."""
    PUBLISHED = 4
    """Rows modified since the last publication of a Checkpointer, in whose marks the bit means
    nothing else; so publishing costs no further set of rows.
    """
    PRIORITY = 8
    """Rows modified since the last checkpoint or priority save. Never frozen by a cut: the
    checkpoint has these rows, and they are marked again if it fails; a publication's leaves them.
    """

    EVERY = 255


NAMED = (int(Consumer.LAST), int(Consumer.BASELINE), int(Consumer.USER))
"""The consumers that may ask for a layer's rows. As all bits here, plain integers: a cut looks at
those of every shard, and operations on flags take ten times as long.
"""
_ALL_NAMED = sum(NAMED)


class Fate(NamedTuple):
    """The outcomes that a layer's rows may have; layers of one fate can be united.

    Attributes:
        bits: consumers for which the rows count; 0, and of no concern, without shares: what doesn't
            count then never will.
        shares: parts of open cuts, by id, with the bits that are noted there.
    """

    bits: int
    shares: frozenset[tuple[int, int]]


class Layer:
    """The marks of one shard between two cuts.

    ``bits`` and the shares are changed only by the layer's ``Marks``, under their lock.

    Args:
        size: number of the shard's rows.
        frozen: mark bytes of at least these rows, which nobody changes any more; None: all content
            is in ``packed``.
        packed: rows by consumer; without ``frozen``, those of all consumers that have any.

    Attributes:
        size: as given.
        bits: consumers for which the rows still count as marked.
    """

    def __init__(
        self,
        size: int,
        frozen: torch.Tensor | None,
        packed: Mapping[int, RowSet] | None = None,
    ) -> None:
        self.size = size
        self.bits = _ALL_NAMED
        self._shares: list[weakref.ref[Share]] = []
        self._frozen = frozen
        self._packed = dict(packed or {})
        self._holders = 0
        self._lock = threading.Lock()  # only ever for an instant
        self._packing = threading.Lock()  # for a pass over the rows
        self._written: torch.cuda.Event | None = None
        if frozen is not None and frozen.is_cuda:
            # Marks that this stream still writes must be there when another one reads them.
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(frozen.device))

    @property
    def shares(self) -> list[Share]:
        """Return the parts of open cuts that took consumers' bits from the layer: held weakly, as
        cuts are.
        """
        return [share for of in self._shares if (share := of()) is not None]

    def take_part(self, share: Share) -> None:
        """Add a part of an open cut."""
        self._shares.append(weakref.ref(share))

    def leave(self, share: Share) -> None:
        """Drop a part of a cut, if it is there."""
        self._shares = [of for of in self._shares if of() not in (None, share)]

    def fate(self) -> Fate:
        """Return what may become of the rows; call this under the lock of the layer's ``Marks``."""
        shares = frozenset((id(share), share.bits_of(self)) for share in self.shares)
        return Fate(self.bits if shares else 0, shares)

    def rows(self, consumers: int) -> RowSet:
        """Return the rows that were marked for any of the consumers at the cut.

        Packed on the first call for a consumer; whether the rows still count makes no difference.
        """
        return RowSet.union([self._rows_of(one) for one in NAMED if one & consumers], self.size)

    def pack(self) -> None:
        """Pack the rows of all consumers."""
        self.rows(_ALL_NAMED)

    def hold(self) -> torch.Tensor | None:
        """Return the frozen bytes, uint8, of which the first ``size`` are the rows', and keep them
        until ``release``.

        None once they were given up; then nothing is to be released.
        """
        if self._written is not None:
            wait_for(self._written)
        with self._lock:
            if self._frozen is not None:
                self._holders += 1
            return self._frozen

    def release(self) -> None:
        """Let go of the frozen bytes: once for each ``hold`` that returned them."""
        with self._lock:
            self._holders -= 1

    def give_up(self) -> torch.Tensor | None:
        """Give up the frozen bytes and return their memory; None while they are needed."""
        with self._lock:
            if self._holders or len(self._packed) < len(NAMED):
                return None
            frozen, self._frozen = self._frozen, None
            return frozen

    def add_to(self, marks: torch.Tensor, consumers: int) -> None:
        """Mark the rows in ``marks``, ``(size,)`` uint8, for those of the consumers they were for.

        A pass over all rows.
        """
        frozen = self.hold()
        if frozen is None:
            for one in NAMED:
                if one & consumers:
                    add_rows(marks, self._rows_of(one), one)
            return
        try:
            marks.bitwise_or_(frozen[: self.size].bitwise_and(consumers & _ALL_NAMED))
        finally:
            self.release()

    def any(self, consumers: int) -> bool:
        """Return whether any row was marked for one of the consumers."""
        frozen = self.hold()
        if frozen is None:
            return self.rows(consumers).any()
        try:
            return bool(frozen[: self.size].bitwise_and(consumers & _ALL_NAMED).any())
        finally:
            self.release()

    def _rows_of(self, consumer: int) -> RowSet:
        with self._packing:
            if consumer in self._packed:
                return self._packed[consumer]
            frozen = self.hold()
            if frozen is None:
                return RowSet.union([], self.size)
            try:
                found = RowSet(frozen[: self.size], consumer)
            finally:
                self.release()
            # Most rows are marked for all consumers at once: then one set serves all.
            same = (other for other in self._packed.values() if other.same_as(found))
            self._packed[consumer] = next(same, found)
            return self._packed[consumer]


Selected = tuple[tuple[Layer, int], ...]
"""Rows of layers, each with the consumers of which the rows count; together one set of rows."""


def union(selected: Selected, size: int) -> RowSet:
    """Return the rows of layers of a shard of ``size`` rows."""
    return RowSet.union([layer.rows(consumers) for layer, consumers in selected], size)


def add_rows(marks: torch.Tensor, rows: RowSet, consumer: int) -> None:
    """Mark rows in ``marks``, ``(rows.rows,)`` uint8, in addition to those marked there."""
    for start, mask in rows.masks():
        again = torch.from_numpy(mask).to(marks.device, torch.uint8) * consumer
        marks[start : start + len(mask)].bitwise_or_(again)


@dataclass(eq=False)
class Share:
    """The marks that one cut took from one shard.

    Attributes:
        consumers: the consumers whose bits were taken.
        layers: the shard's layers at the cut, the new one included, each with the consumers for
            which its rows counted just before. ``Marks`` may replace layers by their union.
    """

    consumers: int
    layers: Selected = ()

    def bits_of(self, layer: Layer) -> int:
        """Return the consumers for which a layer's rows counted just before the cut."""
        return next((bits for held, bits in self.layers if held is layer), 0)

    def selected(self, since: int) -> Selected:
        """Return what was marked for a consumer at the cut, whether it was taken or not."""
        return tuple([(layer, since) for layer, bits in self.layers if bits & since])

    def taken(self) -> Selected:
        """Return what the cut has taken away."""
        return tuple(
            (layer, taken) for layer, bits in self.layers if (taken := bits & self.consumers)
        )
