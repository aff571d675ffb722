"""Hold a file in shared memory alone: create it, open what an earlier process left, grow it.

The folder is open to all users, so nothing that is found there is trusted: not links, not files of
other users or that others may read, not files whose memory is not there. A file belongs to one
living process, named in it by process id and start time; a lock would be inherited by the workers
of data loaders, which may outlive their parent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.shared_memory.space import require_space

PAGE = mmap.ALLOCATIONGRANULARITY
_PID_BITS = 22
"""Linux has no process ids above 2 ** 22."""
_START_BITS = 25
"""Enough of a start time, in hundredths of a second, to tell processes of one id apart: they repeat
after four days.
"""

_mapped: dict[str, weakref.WeakSet[mmap.mmap]] = {}
"""By path, the memory that this process has mapped and still uses, an earlier model for example."""


class NoImage(Exception):
    """A file that is missing, or that is no image for this process; the reason as text."""


def up(size: int) -> int:
    """Round a size up to whole pages."""
    return -(-size // PAGE) * PAGE


class ImageFile:
    """A file in shared memory that this process has open and alone may write to.

    Attributes:
        path: of the file.
        size: in bytes, in whole pages.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._maps: list[tuple[weakref.ref[mmap.mmap], int, int, int]] = []
        """The mapped pieces, each with its address, offset and size."""

    @classmethod
    def open(cls, path: Path) -> ImageFile:
        """Open a file that an earlier process of this user has left.

        Raises:
            NoImage: there is none, or it can't be trusted.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NoImage("there is none") from None
        except OSError as error:
            raise NoImage(f"it can't be opened ({error.strerror})") from None
        try:
            _require_own(os.fstat(descriptor))
            if _mapped.get(str(path)):
                raise NoImage("an earlier model of this process still uses its memory")
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, path: Path, size: int) -> ImageFile:
        """Create a file with memory of its own, in the place of an earlier one.

        Raises:
            ImagesRefused: the place can't be written to, or has too little memory.
        """
        try:
            path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise ImagesRefused(
                f"the image {path} can't be created ({error.strerror}): another user has a file of "
                "that name, or the folder is not writable. Remove the file, or choose another "
                "folder in shared memory, survive=Images(folder=…)"
            ) from error
        file = cls(path, descriptor)
        _mapped.pop(str(path), None)  # earlier mappings are of another file now
        try:
            os.fchmod(descriptor, 0o600)
            file.extend(size)
        except BaseException:
            file.remove()
            raise
        return file

    def extend(self, size: int) -> int:
        """Append memory, rounded up to whole pages; return its offset.

        Raises:
            ImagesRefused: too little memory is left; the file is as before.
        """
        at, size = self.size, up(size)
        require_space(self.path.parent, size)
        try:
            os.posix_fallocate(self._descriptor, at, max(size, PAGE))
        except OSError as error:
            os.ftruncate(self._descriptor, at)
            raise ImagesRefused(
                f"{self.path.parent} has no {size} bytes for an image ({error.strerror}): give it "
                "more, as by `docker run --shm-size`, or run without survive=Images()"
            ) from error
        self.size = at + max(size, PAGE)
        return at

    def require_memory(self) -> None:
        """Require that the whole file has memory: to touch a hole in it may kill the process.

        Raises:
            NoImage: it has none, and none can be had.
        """
        try:
            if self.size:
                os.posix_fallocate(self._descriptor, 0, self.size)
        except OSError as error:
            raise NoImage(f"parts of it have no memory ({error.strerror})") from None

    def map(self, offset: int, size: int) -> torch.Tensor:
        """Map a part of the file: ``(size,)`` uint8, whose writes outlive this process.

        Raises:
            NoImage: the part does not begin at a page, or is not in the file.
        """
        if offset < 0 or size < 0 or offset % PAGE or offset + size > self.size:
            raise NoImage(f"{size} bytes at {offset} are not in its {self.size}")
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapped = mmap.mmap(self._descriptor, size, offset=offset)
        _mapped.setdefault(str(self.path), weakref.WeakSet()).add(mapped)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)  # which keeps the mapping
        self._maps.append((weakref.ref(mapped), tensor.data_ptr(), offset, size))
        return tensor

    def give_back(self, offset: int, size: int) -> None:
        """Give a part's memory back that is used no more."""
        keep_size, punch_hole = 1, 2
        libc_fallocate(self._descriptor, keep_size | punch_hole, offset, size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from taking the file meanwhile.

        Raises:
            NoImage: one is about to take it.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NoImage("another process is about to take it") from None
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Close the file as it is now: what this process writes to mapped memory from now on is its
        own, and not in the file.

        Raises:
            OSError: the memory can't be had; the first pages are still those of the file.
        """
        for mapped, address, offset, size in reversed(self._maps):  # the first pages last
            if mapped() is not None:
                _map_privately(self._descriptor, address, offset, size)
        _mapped.pop(str(self.path), None)
        self.close()

    def close(self) -> None:
        """Close the file; its mapped memory stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Close the file and remove it from its folder, if it is still there; its mapped memory
        stays until the process ends.
        """
        if self._descriptor < 0:
            return
        try:
            here, named = os.fstat(self._descriptor), os.lstat(self.path)
            if (here.st_dev, here.st_ino) == (named.st_dev, named.st_ino):
                self.path.unlink()
        except FileNotFoundError:
            pass
        self.close()


def libc_fallocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    """Call Linux's ``fallocate``, which Python lacks; do nothing where it is not supported."""
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call(descriptor, mode, offset, size)


def _map_privately(descriptor: int, address: int, offset: int, size: int) -> None:
    """Replace a mapping by one of the same content, whose writes are not written to the file.

    Raises:
        OSError: it could not be replaced.
    """
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    private, fixed = mmap.MAP_PRIVATE, 0x10
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if call(address, size, access, private | fixed, descriptor, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _require_own(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NoImage("it is no regular file")
    if found.st_uid != os.geteuid():
        raise NoImage("it belongs to another user")
    if found.st_mode & 0o077:
        raise NoImage(f"other users may open it (mode {stat.S_IMODE(found.st_mode):o})")
    if found.st_nlink != 1:
        raise NoImage(f"it has {found.st_nlink} names")
    if found.st_size % PAGE:
        raise NoImage(f"it was cut off at {found.st_size} bytes")


def this_process() -> int:
    """Return a word that names this process: its id, and when it was started."""
    return _process_word(os.getpid())


def owner_text(word: int) -> str | None:
    """Return the process that a word names, as text, if it is alive and not this one."""
    pid = word & ((1 << _PID_BITS) - 1)
    if word <= 0 or pid == os.getpid() or _process_word(pid) != word:
        return None
    return f"process {pid}"


def _process_word(pid: int) -> int:
    """Return a process's word; 0 if it is not alive."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text[text.rindex(")") + 2 :].split()
        if fields[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1:
            return 0  # dead, and not yet reaped
    except (OSError, ValueError):
        return 0
    started = int(fields[19]) & ((1 << _START_BITS) - 1)
    return started << _PID_BITS | pid
