"""Memory for copies of rows on their way to storage: taken from the system once, used in a circle.

The first touch of memory costs ten times as much as a copy into memory that was touched before, so
it is touched when it is made, in huge pages where the system gives them. Another process can map
the same memory through its file descriptor.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

ALIGNMENT = 64
MEMORY_FRACTION = 0.25
"""Of the memory that is free at the start, shared by the ranks of a machine: the default budget."""
LEAST_DEFAULT = 64 << 20
"""The default budget is no smaller, however little seems to be free."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file", "slab_reclaimable")
"""What ``memory.stat`` calls memory that is given back as soon as somebody needs it."""


class StagingMemory:
    """Bytes that were touched.

    Args:
        size: in bytes.
        shared: another process can map it.
        descriptor: of memory that another process has made; None: new memory.
        pinned: register it with CUDA, for copies that don't wait.
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
                    "background='process' needs memory that processes share, which there is on "
                    "Linux (memfd_create): use background='thread' here"
                )
            descriptor = os.memfd_create("torchrec_checknrun staging", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        """For another process; None if not shared."""
        self._pinned = False
        try:
            self._map = self._mapped()
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            """``(size,)`` uint8."""
            if made:
                self.bytes.zero_()
            if pinned:
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)
                )
                self._pinned = True
        except BaseException:
            self.close()  # else the descriptor would keep what was touched
            raise

    def _mapped(self) -> mmap.mmap:
        if self.descriptor is None:
            mapped = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapped = mmap.mmap(self.descriptor, self.size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped

    def close(self) -> None:
        """Gives the memory back as soon as nobody looks at it any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._pinned = False
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def discard(self) -> None:
        """Gives the memory back at once, where the system can, whoever still refers to it (as an
        error's traceback may): he sees zeros. No bytes are left.
        """
        advice = "MADV_DONTNEED" if self.descriptor is None else "MADV_REMOVE"
        self.close()
        if self.size and hasattr(mmap, advice):
            self._map.madvise(getattr(mmap, advice))
            del self._map
        self.size = 0
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


class StagingAborted(RuntimeError):
    """Who waited for memory waits in vain: those who use it have failed."""


@dataclass
class _Piece:
    offset: int
    stop: int
    free: bool = False


class Ring:
    """Hands out pieces of memory one after the other, each contiguous; waits where none is free.

    One thread takes; others may give back, in any order.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pieces: deque[_Piece] = deque()
        self._by_offset: dict[int, _Piece] = {}
        self._changed = threading.Condition()
        self._aborted = False
        self.waited = False
        """Whether anybody had to wait since ``begin``."""

    def begin(self) -> None:
        """All memory is free again."""
        with self._changed:
            self._pieces.clear()
            self._by_offset.clear()
            self._aborted = self.waited = False

    def take(self, size: int, when_full: Callable[[], None] = lambda: None) -> int:
        """The offset of so many bytes that nobody else has; waits until there are.

        Args:
            when_full: called before the first wait since ``begin``.

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
                raise StagingAborted("what was staged could not be written")
            piece = _Piece(offset, offset + size)
            self._pieces.append(piece)
            self._by_offset[offset] = piece
            return offset

    def release(self, offset: int) -> None:
        """The bytes taken there are free."""
        with self._changed:
            self._by_offset.pop(offset).free = True
            while self._pieces and self._pieces[0].free:
                self._pieces.popleft()
            self._changed.notify_all()

    def abort(self) -> None:
        """Nothing will be given back any more."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _find(self, size: int) -> int | None:
        if not self._pieces:
            return 0
        first, last = self._pieces[0], self._pieces[-1]
        if last.offset < first.offset:  # it has come round
            return last.stop if first.offset - last.stop >= size else None
        if self.size - last.stop >= size:
            return last.stop
        return 0 if first.offset >= size else None


def default_budget() -> int:
    """Bytes: a fraction of the memory that is free now, for each rank of this machine; but never
    so few that saves crawl.
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
    """Bytes that a container may still take. The files it has read and written count as in use
    until others need the memory: after hours of training that is all of it.

    Raises:
        OSError, ValueError: it has no limit, or none that can be read.
    """
    most = int((group / "memory.max").read_text())
    used = int((group / "memory.current").read_text())
    with suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        counts = dict(line.split(maxsplit=1) for line in lines)
        used -= sum(int(counts.get(name, 0)) for name in _RECLAIMABLE)
    return most - max(0, used)
