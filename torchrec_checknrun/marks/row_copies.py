"""Copy rows of a cut before training overwrites them, while the background copies the others.

A cut fixes which rows a checkpoint holds; their copies are made later, each by whoever comes first:
the hook that runs before a kernel's update, for the rows that the update is about to change, into
overflow memory; or the background, chunk by chunk. So training waits for the few rows of a step
instead of all rows of the checkpoint, and each copied row is still that of the cut. The compiled
operations in ``csrc/copy_on_write.h`` claim rows; here is what surrounds them: memory, waiting,
failure.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.protection import Protection
from torchrec_checknrun.native import has_extension

logger = logging.getLogger(__name__)

GENERATIONS = 127
"""Cuts after which the states of a shard's rows are cleared: one byte holds no more."""
PAGE_BYTES = 1 << 16
_LOOK_SECONDS = 0.05
"""Longest wait within one call, so that signals get through."""


def can_copy_on_write(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether rows of these tensors can be copied before they change: each tensor contiguous
    rows in CPU memory, a row of all tensors smaller than a page, and the extension is there.
    """
    return (
        all(t.is_cpu and t.is_contiguous() and t.dim() > 0 for t in tensors)
        and sum(t.stride(0) * t.element_size() for t in tensors) <= PAGE_BYTES - 64
        and has_extension()
    )


class Overflow:
    """Memory for the rows that training is about to overwrite, for all shards of a rank.

    Args:
        memory: ``(size,)`` uint8 on the CPU, touched; cut into pages of ``PAGE_BYTES``.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.native: Any = torch.classes.checknrun.OverflowMemory(memory, PAGE_BYTES)

    @property
    def nearly_full(self) -> bool:
        """Return whether less than a quarter of the pages is free."""
        return bool(4 * self.native.free() < self.native.total())


class RowCopies:
    """The copies of one cut's rows on one rank, from the cut until all rows are copied.

    Args:
        wait_seconds: longest time that one hook waits for overflow memory before it gives the
            checkpoint up.
    """

    def __init__(self, overflow: Overflow, wait_seconds: float) -> None:
        self.overflow = overflow
        self.protection = Protection()
        self._kernels: list[KernelCopies] = []
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._over = self._complete = False
        self._failure: BaseException | None = None

    @property
    def over(self) -> bool:
        """Return True once no row has to be protected: all are copied, or the save failed."""
        return self._over

    @property
    def failure(self) -> BaseException | None:
        """Return the reason why the copies can't be used; None if they can."""
        return self._failure

    def add(self, kernel: KernelCopies) -> None:
        """Add the copies of a kernel's shards."""
        self._kernels.append(kernel)

    def fail(self, error: BaseException) -> None:
        """Give the cut's copies up, unless all rows are copied already; threads that wait in hooks
        go on.
        """
        with self._changed:
            if not self._complete:
                self._failure = self._failure or error
        self._end()

    def complete(self) -> None:
        """End protection, since all rows are copied."""
        with self._changed:
            self._complete = self._failure is None
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._over = True
            for kernel in self._kernels:
                kernel.abandon()
            self._changed.notify_all()

    def memory_freed(self) -> None:
        """Wake the threads that wait for overflow memory."""
        with self._changed:
            self._changed.notify_all()

    def protect(self, copy: Callable[[int], int], count: int) -> None:
        """Copy rows before an update; never raise an error of its own, only those of the caller's
        signal handlers.

        Args:
            copy: copies the rows of ``count`` ids from a place among the ids on, and returns the
                place up to which all are copied.
        """
        if self._over:
            return
        started = time.perf_counter()
        try:
            at = self._copy(copy, 0)
            if at < count:
                self._wait_and_copy(copy, at, count, started)
        finally:
            spent = time.perf_counter() - started
            self.protection.seconds += spent
            self.protection.longest_seconds = max(self.protection.longest_seconds, spent)

    def wait_until_over(self) -> None:
        """Wait until all rows are copied, before a write to rows that can't be named; never without
        bound: after ``wait_seconds`` the copies are given up.
        """
        limit = time.perf_counter() + self._wait_seconds
        with self._changed:
            while not self._over and time.perf_counter() < limit:
                self._changed.wait(_LOOK_SECONDS)
        if not self._over:
            self.fail(
                SaveFailed(
                    "tables were about to be written as a whole, and the rows of the checkpoint in "
                    f"progress were not copied within {self._wait_seconds:g} s: look at the storage"
                )
            )

    def release(self) -> None:
        """Let go of the shards' copies, whose memory goes back once no hook uses them any more."""
        self.count()
        with self._changed:
            self._kernels = []

    def count(self) -> Protection:
        """Return the price of protection so far, with the shards' own counts."""
        kernels = self._kernels  # the background may release them meanwhile
        if not kernels:  # released: noted before
            return self.protection
        self.protection.rows = sum(kernel.protected_rows() for kernel in kernels)
        longest = max(kernel.longest_wait_ns() for kernel in kernels)
        self.protection.row_seconds = longest / 1e9
        return self.protection

    def _copy(self, copy: Callable[[int], int], at: int) -> int:
        """Copy from a place on; where that fails, give the cut's copies up."""
        try:
            return copy(at)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:  # the extension's
            logger.exception("rows could not be copied before their update")
            self.fail(SaveFailed(f"rows could not be copied before their update: {error!r}"))
            return at

    def _wait_and_copy(
        self, copy: Callable[[int], int], at: int, count: int, started: float
    ) -> None:
        """Wait for memory again and again, and copy what it allows."""
        waiting = time.perf_counter()
        while at < count and not self._over:
            if time.perf_counter() - started > self._wait_seconds:
                self.fail(
                    SaveFailed(
                        f"training waited {self._wait_seconds:g} s for memory for rows that it was "
                        "about to overwrite while they were being saved: the storage takes them "
                        "too slowly. Give a larger memory_budget, or save less often"
                    )
                )
                break
            with self._changed:
                if not self._over:
                    self._changed.wait(_LOOK_SECONDS)
            at = self._copy(copy, at)
        self.protection.memory_seconds += time.perf_counter() - waiting


@dataclass
class ShardAtCut:
    """One shard of a kernel at a cut.

    Attributes:
        frozen: the marks as of the cut, each ``(rows,)`` uint8 with the bits that count, or packed
            (a bit per row) with -1; a row is in the set if any has it. None: all rows are.
        tensors: weight and optimizer states, live, ``(rows, …)`` each.
        states: a byte for each row, see ``csrc/copy_on_write.h``.
        generation: 1 to ``GENERATIONS``, another one at each cut.
    """

    frozen: Sequence[tuple[torch.Tensor, int]] | None
    tensors: Sequence[torch.Tensor]
    states: torch.Tensor
    generation: int


class KernelCopies:
    """The shards of one kernel whose rows are copied before they change.

    The compiled object is made by whoever first needs it, best the background: a cut only notes
    what it is made of.

    Args:
        shards: by place among the kernel's shards.
    """

    def __init__(self, copies: RowCopies, shards: Mapping[int, ShardAtCut]) -> None:
        self.copies = copies
        self._at_cut = shards
        self._native: Any = None
        self._lock = threading.RLock()  # a signal's handler may abandon what its thread makes
        copies.add(self)
        self.shards = {
            place: ShardCopies(self, place, shard.tensors) for place, shard in shards.items()
        }

    @property
    def native(self) -> Any:
        """Return the compiled object; from any thread.

        Raises:
            RuntimeError, ValueError, MemoryError: it can't be made.
        """
        if self._native is None:
            with self._lock:
                if self._native is None:
                    self._native = self._made()
        return self._native

    def abandon(self) -> None:
        """End protection."""
        with self._lock:
            if self._native is not None:
                self._native.abandon()

    def protected_rows(self) -> int:
        """Return the number of rows copied before they changed."""
        return 0 if self._native is None else int(self._native.protected_rows())

    def longest_wait_ns(self) -> int:
        """Return the longest wait, in nanoseconds, for a row that was just being copied."""
        return 0 if self._native is None else int(self._native.longest_wait_ns())

    def _made(self) -> Any:
        tensors: list[torch.Tensor] = []
        layout: list[int] = []
        for place, shard in self._at_cut.items():
            frozen = shard.frozen
            if frozen is None:  # all rows
                frozen = []
            elif not frozen:  # none: any byte without any bit
                frozen = [(shard.states, 0)]
            layout += [place, shard.tensors[0].size(0), shard.generation, len(frozen)]
            layout += [bits for _, bits in frozen]
            layout.append(len(shard.tensors))
            tensors += [marks for marks, _ in frozen]
            tensors += [*shard.tensors, shard.states]
        made = torch.classes.checknrun.KernelRows(tensors, layout, self.copies.overflow.native)
        if self.copies.over:  # ``abandon`` found nothing to end
            made.abandon()
        return made

    def before_update(
        self, values: torch.Tensor, offsets: list[int], feature_to_shard: list[int]
    ) -> None:
        """Copy the rows of a backward pass, before the kernel updates them.

        Args:
            values: shard-local ids of all features, ``(n,)`` of any integer dtype.
            offsets: place of each feature's first id, and the end.
        """
        if self.copies.over:
            return
        ids = values.to(torch.int64).contiguous()
        self.copies.protect(
            lambda at: self.native.protect(ids, offsets, feature_to_shard, at), len(ids)
        )

    def before_write(self, place: int, ids: torch.Tensor) -> None:
        """Copy rows of one shard before they are written by other means than training.

        Args:
            ids: shard-local, ``(n,)`` of any integer dtype.
        """
        if self.copies.over:
            return
        ids = ids.to(device="cpu", dtype=torch.int64).reshape(-1).contiguous()
        self.copies.protect(lambda at: self.native.protect_shard(place, ids, at), len(ids))


class ShardCopies:
    """The rows of one shard as of a cut, for the background."""

    def __init__(self, kernel: KernelCopies, place: int, tensors: Sequence[torch.Tensor]) -> None:
        self._kernel = kernel
        self._place = place
        self._tensors = tensors

    @functools.cached_property
    def native(self) -> Any:
        """Return the compiled object of this shard, looked up behind training."""
        return self._kernel.native.shard(self._place)

    def stage(
        self, positions: torch.Tensor, row_start: int, memory: torch.Tensor, offsets: list[int]
    ) -> None:
        """Copy rows as of the cut to memory, each row of the set once; see ``stage_rows``.

        Args:
            positions: all rows of the set within their range, ``(n,)`` int64, sorted.

        Raises:
            SaveFailed: the copies were given up.
        """
        with self._unless_given_up():
            self.native.stage(positions, row_start, memory, offsets)

    def sample(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Copy some rows of the set as of the cut; they are still to be staged.

        Args:
            positions: ``(n,)`` int64, sorted.

        Returns:
            For each of the shard's tensors its rows, ``(n, …)``.

        Raises:
            SaveFailed: the copies were given up.
        """
        into = [tensor.new_empty((len(positions), *tensor.shape[1:])) for tensor in self._tensors]
        with self._unless_given_up():
            self.native.sample(positions, into)
        return into

    @contextmanager
    def _unless_given_up(self) -> Iterator[None]:
        """Raise the reason why the copies were given up, if that is why some are missing."""
        try:
            yield
        except RuntimeError:
            if (failure := self._kernel.copies.failure) is not None:
                raise failure from None
            raise
