"""Inject faults into storage: errors, delays, short and lost writes, stale reads.

Builds on the storage of the sweeps, which counts the package's operations: in memory, like an
object store, or the local disk.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

import fsspec

from tests.crash.faulty_store import Faults, FaultyStore

T = TypeVar("T")

PROTOCOL = "unsound"
HANG_SECONDS = 0.05


class Kind(Enum):
    """The faults of an operation."""

    NO_SPACE = "no space left"
    DENIED = "permission denied"
    BROKEN = "input/output error"
    TIMED_OUT = "timed out"
    RESET = "connection reset"
    ANSWER_LOST = "done, and an error for answer"
    RESET_AFTER = "done, and the connection reset"
    HANG = "late"
    HANG_ERROR = "late, and an error"
    HALF = "half done, and an error"
    SHORT = "a short write that says so"
    SHORT_SILENT = "a short write that says nothing"
    LOST = "nothing done, and success reported"
    TWICE = "done twice"
    STALE_LIST = "a listing of some time ago"
    EMPTY_LIST = "a listing without what is new"
    STALE_READ = "an object as it was before, or not there yet"
    SHORT_READ = "half of what was asked for"
    FLIPPED_READ = "a flipped bit in what was read"

    @property
    def lags(self) -> bool:
        """Return whether a fault hides from the reader what others have written."""
        return self in (Kind.STALE_LIST, Kind.EMPTY_LIST, Kind.STALE_READ)


_BEFORE = {
    Kind.NO_SPACE: errno.ENOSPC,
    Kind.DENIED: errno.EACCES,
    Kind.BROKEN: errno.EIO,
    Kind.TIMED_OUT: errno.ETIMEDOUT,
    Kind.RESET: errno.ECONNRESET,
    Kind.HANG_ERROR: errno.EIO,
}
_LOSABLE = ("put", "write", "delete", "rename", "link")
IN_MEMORY_ONLY = (Kind.SHORT_SILENT, Kind.LOST, Kind.STALE_READ, Kind.FLIPPED_READ, Kind.SHORT_READ)
"""Faults that a local disk does not have."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        at: number of the first affected operation, among those that the fault can affect, from 1.
        length: number of affected operations.
    """

    kind: Kind
    at: int
    length: int = 1


class Injector(Faults):
    """An injector of the chosen faults.

    Attributes:
        happened: kinds and operations of the injected faults.
    """

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[tuple[Kind, str]] = []
        self.older = threading.local()
        """``value``: the earlier content of an object that is being read, None if it was not there.
        """
        self._faults: list[Fault] = []
        self._seen: dict[Fault, int] = {}
        self._listings: dict[str, Any] = {}

    def set(self, faults: list[Fault]) -> None:
        """Replace the faults to inject; an empty list makes the storage sound."""
        with self._lock:
            self._faults, self._seen, self._armed = faults, dict.fromkeys(faults, 0), bool(faults)

    def clear(self) -> None:
        """Forget the injected faults and the storage's history."""
        with self._lock:
            self.happened = []
            self._listings.clear()

    def _carry_out(
        self,
        name: str,
        act: Callable[[], T],
        changes: bool,
        half: Callable[[], object] | None,
    ) -> T:
        kind = self._choose(name, changes, half is not None)
        if kind is None:
            return self._remembered(name, act())
        return self._unsound(kind, name, act, half)

    def _choose(self, name: str, changes: bool, partly: bool) -> Kind | None:
        with self._lock:
            chosen: Fault | None = None
            for fault in self._faults:
                if not _can_happen(fault.kind, name, changes, partly):
                    continue
                self._seen[fault] += 1
                if fault.at <= self._seen[fault] < fault.at + fault.length:
                    chosen = chosen or fault
            if chosen is not None:
                self.happened.append((chosen.kind, name))
            return chosen.kind if chosen else None

    def _remembered(self, name: str, result: T) -> T:
        if name == "list" and isinstance(result, list) and result:
            self._listings[_parent(result)] = list(result)
        return result

    def _unsound(
        self, kind: Kind, name: str, act: Callable[[], T], half: Callable[[], object] | None
    ) -> Any:
        if kind in (Kind.HANG, Kind.HANG_ERROR):
            time.sleep(HANG_SECONDS)
        if kind in _BEFORE:
            raise _error(_BEFORE[kind])
        if kind in (Kind.ANSWER_LOST, Kind.RESET_AFTER):
            act()
            raise _error(errno.EIO if kind is Kind.ANSWER_LOST else errno.ECONNRESET)
        if kind is Kind.HALF:
            assert half is not None
            half()
            raise _error(errno.EIO)
        if kind in (Kind.SHORT, Kind.SHORT_SILENT):
            assert half is not None
            done = half()
            return done if kind is Kind.SHORT else 2 * int(str(done or 0))
        if kind is Kind.LOST:
            return None
        if kind is Kind.TWICE:
            act()
            return act()
        if kind is Kind.STALE_READ:
            return self._stale_read()
        return self._altered(kind, name, act())

    def _stale_read(self) -> Any:
        if self.older.value is None:
            raise FileNotFoundError(errno.ENOENT, "not there yet, says the test")
        return self.older.value

    def _altered(self, kind: Kind, name: str, result: Any) -> Any:
        """Return the wrong result of an operation that was done."""
        if kind is Kind.SHORT_READ:
            return result[: len(result) // 2]
        if kind is Kind.FLIPPED_READ:
            place = len(result) // 2
            return result[:place] + bytes([result[place] ^ 4]) + result[place + 1 :]
        if kind in (Kind.STALE_LIST, Kind.EMPTY_LIST) and result:
            before = self._listings.get(_parent(result))
            if kind is Kind.EMPTY_LIST or before is None:
                return []
            return before
        return self._remembered(name, result)


def _can_happen(kind: Kind, name: str, changes: bool, partly: bool) -> bool:
    if kind in (Kind.HALF, Kind.SHORT, Kind.SHORT_SILENT):
        return partly
    if kind is Kind.LOST:
        return name in _LOSABLE
    if kind in (Kind.ANSWER_LOST, Kind.RESET_AFTER, Kind.NO_SPACE):
        return changes
    if kind is Kind.TWICE:
        return name in ("put", "list", "look", "make a folder")
    if kind in (Kind.STALE_LIST, Kind.EMPTY_LIST):
        return name == "list"
    if kind in (Kind.STALE_READ, Kind.SHORT_READ, Kind.FLIPPED_READ):
        return name == "read"
    return True


def _error(number: int) -> OSError:
    return OSError(number, "says the test")


def _parent(entries: list[Any]) -> str:
    first = entries[0]["name"] if isinstance(entries[0], dict) else entries[0]
    return f"{type(entries[0]).__name__} {str(first).rstrip('/').rpartition('/')[0]}"


class UnsoundStore(FaultyStore):
    """An object store in memory that keeps its objects' versions, for stale reads."""

    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    injector: ClassVar[Injector] = Injector()
    faults: ClassVar[Faults] = injector
    _versions: ClassVar[dict[str, list[bytes]]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        older = self._versions.get(self._strip_protocol(path), [])[-2:-1]
        self.injector.older.value = older[0][start:end] if older else None
        return super().cat_file(path, start, end, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Store an object and keep its version; half a put stores half of the object."""

        def half() -> int:
            part = value[: len(value) // 2]
            super(FaultyStore, self).pipe_file(path, part, mode, **options)
            return len(part)

        def put() -> None:
            super(FaultyStore, self).pipe_file(path, value, mode, **options)
            self._versions.setdefault(self._strip_protocol(path), []).append(value)

        self.injector.run("put", put, True, half)

    @classmethod
    def clear(cls) -> None:
        """Forget all objects, versions and faults."""
        super().clear()
        cls._versions.clear()
        cls.injector.clear()


fsspec.register_implementation(PROTOCOL, UnsoundStore, clobber=True)
