"""Choose the tables whose rows are copied on write, and watch over their copies of one cut.

Training goes on while rows of these tables are copied, so their memory must be known to change by
ways that the package sees: a fused update of looked-up rows, which the kernel's hook announces, or
a write that this package makes. Writes by hand are noticed afterwards, and spoil the checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import islice

import torch

from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.layers import Layer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.marks.row_copies import (
    GENERATIONS,
    PAGE_BYTES,
    KernelCopies,
    Overflow,
    RowCopies,
    ShardAtCut,
    ShardCopies,
    can_copy_on_write,
)
from torchrec_checknrun.model.hand_written import WriteWatch
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.snapshot.items import RowsItem
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot

_LOOKS = 32
"""A look at what overflow memory holds names one in so many of the items that are left."""


def why_copied_at_cut(shard: TrackedShard) -> str | None:
    """Return the reason why a shard's rows must be copied while training waits; None if they can
    be copied on write.
    """
    kernel = shard.writes.kernel
    if not shard.local.weight.is_cpu:
        return "not in CPU memory"
    if kernel.touches_other_rows:
        return "its kernel changes rows that were not looked up"
    if shard.writes.spoils:
        return "the program writes rows outside of training"
    if not can_copy_on_write(shard.local.tensors):
        return "no compiled extension, or rows not in one piece"
    return None


class _RowStates:
    """The bytes that tell which rows of a shard are copied, and the generation of the last cut."""

    def __init__(self, rows: int) -> None:
        self.bytes = torch.zeros(rows, dtype=torch.uint8, device="cpu").zero_()  # touched
        self.generation = 0

    def advance(self) -> int:
        """Begin the next generation."""
        if self.generation == GENERATIONS:
            self.renew()
        self.generation += 1
        return self.generation

    def renew(self) -> None:
        """Begin with new bytes once no generation is left; a pass over the rows, best done behind.

        Not by clearing the old ones: of a save that was given up, a hook or the background may
        still be copying rows, and would leave states there that a later cut takes for its own.
        """
        if self.generation == GENERATIONS:
            self.bytes = torch.zeros_like(self.bytes).zero_()  # touched
            self.generation = 0


class CopyOnWriteMemory:
    """The memory of copy on write that stays between the checkpoints of one Checkpointer.

    Args:
        size: bytes of overflow memory.
        shards: those that are expected to be copied on write.
    """

    def __init__(self, size: int, shards: Iterable[TrackedShard]) -> None:
        self._memory = StagingMemory(max(PAGE_BYTES, size // PAGE_BYTES * PAGE_BYTES))
        self.overflow = Overflow(self._memory.bytes)
        self._states: weakref.WeakKeyDictionary[Marks, _RowStates] = weakref.WeakKeyDictionary()
        for shard in shards:
            self.states(shard.marks)

    @property
    def size(self) -> int:
        """Return the size in bytes of the overflow memory."""
        return self._memory.size

    def states(self, marks: Marks) -> _RowStates:
        """Return the states of a shard's rows, new ones for a new shard."""
        found = self._states.get(marks)
        if found is None:
            found = self._states[marks] = _RowStates(marks.rows)
        return found

    def close(self) -> None:
        """Release the memory as soon as no cut uses it."""
        self._memory.close()


class CutRows:
    """The rows of one cut that are copied on write, on this rank.

    Made by the training thread at the cut, before training goes on. ``protect`` begins protection,
    ``finish`` checks the copies once all are made; ``close`` ends everything, whatever happened.

    Args:
        snapshots: the shards; each gets its copies.
        wait_seconds: longest time that training waits for overflow memory.
    """

    def __init__(
        self, memory: CopyOnWriteMemory, snapshots: Sequence[ShardSnapshot], wait_seconds: float
    ) -> None:
        self.snapshots = list(snapshots)
        self.copies = RowCopies(memory.overflow, wait_seconds)
        self._held: list[Layer] = []
        self._states: list[_RowStates] = []
        self._urgent: list[str] = []  # the most urgent last
        self._watches: dict[WriteWatch, KernelCopies] = {}
        by_watch: dict[WriteWatch, dict[int, ShardAtCut]] = {}
        try:
            for snapshot in self.snapshots:
                shard = snapshot.tracked
                assert shard is not None
                states = memory.states(shard.marks)
                self._states.append(states)
                generation = states.advance()  # first: it may make new bytes
                by_watch.setdefault(shard.writes, {})[shard.index] = ShardAtCut(
                    self._frozen(snapshot), snapshot.tensors, states.bytes, generation
                )
            for watch, shards in by_watch.items():
                self._watches[watch] = KernelCopies(self.copies, shards)
        except BaseException:
            self.close()
            raise
        for snapshot in self.snapshots:
            assert snapshot.tracked is not None
            kernel = self._watches[snapshot.tracked.writes]
            snapshot.copies, snapshot.later = kernel.shards[snapshot.tracked.index], True

    def protect(self) -> None:
        """Have the kernels' hooks copy rows before they change."""
        for watch, copies in self._watches.items():
            watch.copies = copies

    def make_ready(self) -> None:
        """Make the kernels' compiled objects, so that no hook has to; call this in the background.

        Raises:
            RuntimeError, ValueError, MemoryError: one can't be made.
        """
        for copies in list(self._watches.values()):
            _ = copies.native

    def finish(self) -> None:
        """Check that each row of the cut was copied once and nobody wrote unseen; end protection.

        Raises:
            SaveFailed: the copies are not those of the cut.
        """
        for watch in self._watches:
            if watch.is_written():
                watch.spoil()
        self.check()
        for snapshot in self.snapshots:
            assert snapshot.copies is not None
            copied, expected = snapshot.copies.native.staged(), snapshot.count
            if copied != expected:
                raise SaveFailed(
                    f"{snapshot.shard}: {copied} rows were copied, and {expected} are modified: "
                    "the checkpoint is not committed. Report this, please"
                )
        self.copies.complete()
        self.check()

    def check(self) -> None:
        """Raise the error that spoils the copies, if any.

        Raises:
            SaveFailed: see ``RowCopies.failure``.
        """
        if self.copies.failure is not None:
            raise self.copies.failure

    def most_urgent(self, left: Mapping[str, RowsItem]) -> str | None:
        """Return an item that frees much overflow memory; None if there is enough of it.

        A look at all items names the next few: the items of a large shard are many.

        Args:
            left: the items that are still to be staged, by name.
        """
        if not self.copies.overflow.nearly_full:
            self._urgent = []
            return None
        while self._urgent:
            if (name := self._urgent.pop()) in left:
                return name
        ranges: dict[ShardCopies, list[int]] = {}
        names: dict[ShardCopies, list[str]] = {}
        for name, item in left.items():
            copies = item.shard.copies
            if copies is None:
                continue
            ranges.setdefault(copies, []).extend((item.start, item.stop))
            names.setdefault(copies, []).append(name)
        held = [
            (count, name)
            for copies, of_shard in ranges.items()
            for count, name in zip(copies.native.held_in(of_shard), names[copies], strict=True)
            if count
        ]
        few = 1 + len(left) // _LOOKS
        next_ones = [name for _, name in nlargest(few, held)] or [*islice(left, few)]
        self._urgent = next_ones[::-1]
        return self._urgent.pop() if self._urgent else None

    def close(self) -> None:
        """End protection, note its price, and let go of the frozen marks; idempotent."""
        self.copies.fail(SaveFailed("the rows of the checkpoint were given up"))
        self.copies.count()
        for watch, copies in self._watches.items():
            if watch.copies is copies:
                watch.copies = None
        held, self._held = self._held, []
        for layer in held:
            layer.release()
        for states in self._states:
            with suppress(MemoryError, RuntimeError):  # no memory: a later cut asks again
                states.renew()

    def release(self) -> None:
        """Give overflow memory back, once no thread copies rows; else errors would keep it, since
        their tracebacks hold the save.
        """
        for snapshot in self.snapshots:
            snapshot.copies = None
        self.snapshots = []
        self._watches = {}
        self.copies.release()

    def _frozen(self, snapshot: ShardSnapshot) -> list[tuple[torch.Tensor, int]] | None:
        """Return the marks that tell which rows are in the snapshot: bytes that nobody changes
        any more, with the bits that count, or packed ones, with -1. None: all rows are.
        """
        if snapshot.selected is None:
            return None
        found = []
        for layer, consumers in snapshot.selected:
            frozen = layer.hold()
            if frozen is None:
                found.append((layer.rows(consumers).packed, -1))
            else:
                self._held.append(layer)
                found.append((frozen, int(consumers)))
        return found
