"""Fail storage at a chosen operation: a fsspec file system of its own, or the local disk.

Operations are counted as ``Folder`` asks for them. The fsspec one (``faulty://``) is in memory and
behaves as object stores do; the disk is the real one, with the calls to it wrapped.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar
from unittest import mock

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from torchrec_checknrun.store import local, new_file, retry

T = TypeVar("T")

PROTOCOL = "faulty"
RENEWAL = "checknrun-lease"
"""The thread that renews a claim."""


class Mode(Enum):
    """A way in which an operation fails."""

    ONCE = "once"
    EVER = "for ever"
    PARTIAL = "after a partial write"
    LOST = "after success"
    BUSY = "for a moment"
    LOST_BUSY = "for a moment, after success"

    @property
    def transient(self) -> bool:
        """Tell whether another try may heal it."""
        return self in (Mode.BUSY, Mode.LOST_BUSY)

    def error(self) -> OSError:
        if self is Mode.BUSY:
            return OSError(errno.EBUSY, "busy, says the test")
        if self is Mode.LOST_BUSY:
            return ConnectionResetError(errno.ECONNRESET, "connection reset, says the test")
        return OSError(errno.ENOSPC, "no space left, says the test")


@dataclass(frozen=True)
class Operation:
    """An operation that was asked for.

    Attributes:
        changes: something in the storage.
        partly: it can be done by half.
    """

    name: str
    changes: bool
    partly: bool

    def can_fail(self, mode: Mode) -> bool:
        """Tell whether that is another failure than ``ONCE``, or than ``BUSY``."""
        if mode is Mode.PARTIAL:
            return self.partly
        return self.changes or mode not in (Mode.LOST, Mode.LOST_BUSY)

    @property
    def streams(self) -> bool:
        """Tell whether the operation writes a file piece by piece, or makes it durable.

        Such an operation is not repeated: nobody knows what the first try has left.
        """
        return self.name in ("write", "flush", "close", "fsync", "fsync of a folder")


class Faults:
    """A count of operations, of which the chosen one fails.

    Attributes:
        asked_for: all while it was armed.
        failed: those that were made to fail.
    """

    def __init__(self) -> None:
        self.asked_for: list[Operation] = []
        self.failed: list[Operation] = []
        self._armed = False
        self._at = self._candidates = 0
        self._mode: Mode | None = None
        self._within = threading.local()
        self._lock = threading.Lock()

    def arm(self, at: int, mode: Mode | None) -> None:
        """Count from now on, and fail one operation if there is a mode.

        Args:
            at: which of those that can fail that way, counted from 1.
        """
        with self._lock:
            self.asked_for, self.failed, self._at, self._mode = [], [], at, mode
            self._candidates = 0
            self._armed = True

    def disarm(self) -> None:
        """Count nothing and fail nothing from now on."""
        with self._lock:
            self._armed = False

    def run(
        self,
        name: str,
        act: Callable[[], T],
        changes: bool = False,
        half: Callable[[], object] | None = None,
    ) -> T:
        """Run an operation; others that it consists of are part of it.

        The renewal of a claim is none: it comes by the clock, every 15 seconds, and on a busy
        machine a case can take as long.
        """
        if getattr(self._within, "one", False) or threading.current_thread().name == RENEWAL:
            return act()
        self._within.one = True
        try:
            return self._carry_out(name, act, changes, half)
        finally:
            self._within.one = False

    def _carry_out(
        self,
        name: str,
        act: Callable[[], T],
        changes: bool,
        half: Callable[[], object] | None,
    ) -> T:
        """Do an operation that no other is part of, or make it fail."""
        mode = self._ask(Operation(name, changes, half is not None))
        if mode is None:
            return act()
        if mode is Mode.PARTIAL and half is not None:
            half()
        if mode in (Mode.LOST, Mode.LOST_BUSY):
            act()
        raise mode.error()

    def _ask(self, operation: Operation) -> Mode | None:
        with self._lock:
            if not self._armed:
                return None
            self.asked_for.append(operation)
            mode = self._mode
            if mode is None or not operation.can_fail(mode):
                return None
            self._candidates += 1
            if self._candidates == self._at or (mode is Mode.EVER and self._candidates > self._at):
                self.failed.append(operation)
                return mode
            return None


class FaultyFile:
    """A file that is being written."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file = file
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        return self._faults.run(
            "write",
            lambda: self._file.write(view),
            changes=True,
            half=lambda: self._file.write(view[: len(view) // 2]),
        )

    def flush(self) -> None:
        self._faults.run("flush", self._file.flush, changes=True)

    def close(self) -> None:
        self._faults.run("close", self._file.close, changes=True)


class FaultyStore(MemoryFileSystem):
    """A store of objects in memory: a put is there wholly or not at all."""

    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Faults] = Faults()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        plain: str = super()._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://"))
        return plain

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.faults.run("list", lambda: super(FaultyStore, self).ls(path, detail, **options))

    def info(self, path: str, **options: Any) -> Any:
        return self.faults.run("look", lambda: super(FaultyStore, self).info(path, **options))

    def exists(self, path: str, **options: Any) -> Any:
        return self.faults.run("look", lambda: super(FaultyStore, self).exists(path, **options))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        return self.faults.run(
            "read", lambda: super(FaultyStore, self).cat_file(path, start, end, **options)
        )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.faults.run(
            "make a folder", lambda: super(FaultyStore, self).makedirs(path, exist_ok), changes=True
        )

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        nested = getattr(self.faults._within, "one", False)
        file = self.faults.run(
            "open",
            lambda: super(FaultyStore, self).open(path, mode, **options),
            changes="w" in mode,
        )
        return file if nested or "w" not in mode else FaultyFile(file, self.faults)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.faults.run(
            "put",
            lambda: super(FaultyStore, self).pipe_file(path, value, mode, **options),
            changes=True,
        )

    def rm_file(self, path: str) -> None:
        self.faults.run("delete", lambda: self._rm(path), changes=True)

    def rmdir(self, path: str) -> None:
        self.faults.run("delete", lambda: super(FaultyStore, self).rmdir(path), changes=True)

    @classmethod
    def clear(cls) -> None:
        """Forget everything that was stored."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    @classmethod
    def copied(cls) -> dict[str, bytes]:
        """Return all objects, by path."""
        return {path: file.getvalue() for path, file in cls.store.items()}


fsspec.register_implementation(PROTOCOL, FaultyStore, clobber=True)


class _FaultyOs:
    """The module ``os``, as far as ``store.local`` and ``new_file`` use it."""

    _NAMES: ClassVar[dict[str, tuple[str, bool]]] = {
        "listdir": ("list", False),
        "scandir": ("list", False),
        "stat": ("look", False),
        "pread": ("read", False),
        "preadv": ("read", False),
        "mkdir": ("make a folder", True),
        "link": ("link", True),
        "rename": ("rename", True),
        "unlink": ("delete", True),
        "rmdir": ("delete", True),
    }

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "write", "fsync"):
            return getattr(self, f"_{name}")
        real = getattr(os, name)
        if name not in self._NAMES:
            return real
        said, changes = self._NAMES[name]
        return lambda *args, **options: self._faults.run(
            said, lambda: real(*args, **options), changes
        )

    def _open(self, path: str, flags: int, *mode: int, **options: Any) -> int:
        """Open a file; opening the directories on the way to it is part of what is done there."""
        if flags & os.O_DIRECTORY:
            return os.open(path, flags, *mode, **options)
        new = bool(flags & os.O_CREAT)
        return self._faults.run("open", lambda: os.open(path, flags, *mode, **options), new)

    def _write(self, descriptor: int, data: memoryview) -> int:
        return self._faults.run(
            "write",
            lambda: os.write(descriptor, data),
            changes=True,
            half=lambda: os.write(descriptor, data[: len(data) // 2]),
        )

    def _fsync(self, descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        name = "fsync of a folder" if is_folder else "fsync"
        self._faults.run(name, lambda: os.fsync(descriptor), changes=True)


@contextmanager
def faulty_disk(faults: Faults) -> Iterator[None]:
    """Let every ``Folder`` on a local disk meet the faults."""

    with (
        mock.patch.object(local, "os", _FaultyOs(faults)),
        mock.patch.object(new_file, "os", _FaultyOs(faults)),
    ):
        yield


@contextmanager
def patience(mode: Mode) -> Iterator[None]:
    """Retry for seconds where another try may help, and not at all where it can't."""
    seconds = "20" if mode.transient else "0"
    with (
        mock.patch.dict(os.environ, {"CHECKNRUN_RETRY_SECONDS": seconds}),
        mock.patch.object(retry, "_FIRST_PAUSE", 0.001),
    ):
        yield
