"""Staging memory for copies of rows on their way to storage: allocated once, used as a ring.

The first touch of memory costs ten times as much as a copy into memory that was touched before, so
staging memory is touched when it is allocated, in huge pages where the system has them. Another
process can map the same memory through its file descriptor.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from torchrec_checknrun.marks.gpu_streams import wait_for

logger = logging.getLogger(__name__)

ALIGNMENT = 64
MEMORY_FRACTION = 0.25
"""Default budget of all ranks of a machine, as a fraction of the memory that is free at the start.
"""
LEAST_DEFAULT = 64 << 20
"""Least default budget in bytes, however little memory seems to be free."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file", "slab_reclaimable")
"""Names in ``memory.stat`` of memory that the kernel reclaims on demand."""


class StagingMemory:
    """Memory that was touched.

    Args:
        size: in bytes.
        shared: allocate memory that another process can map.
        descriptor: file descriptor of another process's memory; None: allocate new memory.
        pinned: register the memory with CUDA, for asynchronous copies.

    Attributes:
        descriptor: file descriptor for another process; None if not shared.
        bytes: the memory, ``(size,)`` uint8.
        filling: recorded once a GPU has made its copies into the memory; None without any.

    Raises:
        RuntimeError: the system has no shared memory of this kind.
    """

    def __init__(
        self,
        size: int,
        *,
        shared: bool = False,
        descriptor: int | None = None,
        pinned: bool = False,
    ) -> None:
        self.size = size
        made = descriptor is None
        if shared:
            if not hasattr(os, "memfd_create"):
                raise RuntimeError(
                    "background='process' needs memory that processes share, which only Linux has "
                    "(memfd_create): use background='thread' here"
                )
            descriptor = os.memfd_create("torchrec_checknrun staging", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._pinned = False
        self.filling: torch.cuda.Event | None = None
        try:
            self._map = self._mapped()
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            if made:
                self.bytes.zero_()
            if pinned:
                self._pin()
        except BaseException:
            self.close()  # else the descriptor would keep the pages alive
            raise

    def _mapped(self) -> mmap.mmap:
        if self.descriptor is None:
            mapped = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapped = mmap.mmap(self.descriptor, self.size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped

    def _pin(self) -> None:
        """Register the memory with CUDA."""
        result = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0)
        try:
            torch.cuda.check_error(result)
        except RuntimeError as error:
            # CUDA keeps the error, and PyTorch reports it at the next kernel: not at training's.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            raise RuntimeError(
                f"{self.size} bytes of staging memory could not be page-locked for copies from the "
                f"GPU ({error}): give a smaller memory_budget, or let processes lock more memory "
                "(ulimit -l, the container's limit)"
            ) from error
        self._pinned = True

    def wait_until_filled(self) -> None:
        """Wait for a GPU's copies into the memory, of a save that has failed perhaps: they would
        come into what else is written there.

        Raises:
            RuntimeError: the GPU has failed.
        """
        filling, self.filling = self.filling, None
        if filling is not None:
            wait_for(filling)

    def close(self) -> None:
        """Release the memory as soon as no reference is left."""
        try:
            self.wait_until_filled()
        except RuntimeError:
            logger.exception("the GPU has failed, and copies nothing into staging memory any more")
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def discard(self) -> None:
        """Release the pages at once if the system supports it; remaining references (such as an
        error's traceback) read zeros. ``size`` becomes 0.
        """
        advice = "MADV_DONTNEED" if self.descriptor is None else "MADV_REMOVE"
        self.close()
        if self.size and hasattr(mmap, advice):
            self._map.madvise(getattr(mmap, advice))
            del self._map
        self.size = 0
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


class StagingAborted(RuntimeError):
    """The background has failed, so that staging memory will not become free."""


@dataclass
class _Piece:
    offset: int
    stop: int
    free: bool = False


class Ring:
    """An allocator of contiguous pieces in ring order, which waits while no piece is free.

    One thread takes pieces; other threads may release them, in any order.

    Args:
        size: of the memory, in bytes.

    Attributes:
        waited: whether a ``take`` has waited.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pieces: deque[_Piece] = deque()
        self._by_offset: dict[int, _Piece] = {}
        self._changed = threading.Condition()
        self._aborted = False
        self.waited = False

    def begin(self) -> None:
        """Mark all memory as free."""
        with self._changed:
            self._pieces.clear()
            self._by_offset.clear()
            self._aborted = self.waited = False

    def take(self, size: int, when_full: Callable[[], None] = lambda: None) -> int:
        """Allocate a piece, waiting until there is room.

        Args:
            size: in bytes, at most the ring's.
            when_full: called before the first wait.

        Returns:
            The piece's offset, aligned to ``ALIGNMENT``.

        Raises:
            StagingAborted: ``abort`` was called.
        """
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        assert size <= self.size, "an item is larger than the staging memory"
        with self._changed:
            while (offset := self._find(size)) is None and not self._aborted:
                if not self.waited:
                    self.waited = True
                    when_full()
                self._changed.wait()
            if offset is None:
                raise StagingAborted("staged items could not be written")
            piece = _Piece(offset, offset + size)
            self._pieces.append(piece)
            self._by_offset[offset] = piece
            return offset

    def release(self, offset: int) -> None:
        """Free the piece at an offset."""
        with self._changed:
            self._by_offset.pop(offset).free = True
            while self._pieces and self._pieces[0].free:
                self._pieces.popleft()
            self._changed.notify_all()

    def abort(self) -> None:
        """End all waits: no piece will be released any more."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _find(self, size: int) -> int | None:
        if not self._pieces:
            return 0
        first, last = self._pieces[0], self._pieces[-1]
        if last.offset < first.offset:  # wrapped around
            return last.stop if first.offset - last.stop >= size else None
        if self.size - last.stop >= size:
            return last.stop
        return 0 if first.offset >= size else None


def default_budget() -> int:
    """Return the default memory budget of a rank in bytes: an equal share of a fraction of the free
    memory, but never so little that saves crawl.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # a container may have less; "max" is no number
        free = min(free, _free_in_group(_CONTROL_GROUP))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(LEAST_DEFAULT, int(free * MEMORY_FRACTION / ranks))


def _free_in_group(group: Path) -> int:
    """Return the bytes that a container may still take.

    Cached files, which the kernel counts as used memory until the memory is needed, count as free:
    after hours of training the cache fills all of it.

    Raises:
        OSError, ValueError: no limit, or none that can be read.
    """
    most = int((group / "memory.max").read_text())
    used = int((group / "memory.current").read_text())
    with suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        counts = dict(line.split(maxsplit=1) for line in lines)
        used -= sum(int(counts.get(name, 0)) for name in _RECLAIMABLE)
    return most - max(0, used)
