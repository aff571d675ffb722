"""Audit readers of hostile input: nothing may be unpickled, run, sent or written elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any

_FORBIDDEN = frozenset(
    {
        *("pickle.find_class", "marshal.load", "marshal.loads", "code.__new__"),
        *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
        *("socket.connect", "socket.bind", "ctypes.dlopen", "shutil.rmtree"),
    }
)
_CHANGING = frozenset(
    {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"},
)


class Guard:
    """An audit hook that listens while ``on``; needs a process of its own, as hooks stay.

    Args:
        allowed: the folder that may be written to.

    Attributes:
        found: forbidden actions.
    """

    def __init__(self, allowed: str) -> None:
        self._allowed = os.path.realpath(allowed)
        self.on = False
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "pickle.find_class" and given[0] == "torchrec_checknrun.errors":
            return  # ignore this package's own errors from other threads: no input caused them
        if event in _FORBIDDEN:
            if event == "shutil.rmtree" and self._inside(given[0]):
                return
            self.found.append(f"{event} {given!r:.300}")
        elif event == "open" and _writes(given):
            if not (self._inside(given[0]) or _is_new_and_plain(given)):
                self.found.append(f"open {given!r:.300}")
        elif event == "open" and _is_directory(given) and not self._leads_inside(given[0]):
            self.found.append(f"open a directory {given!r:.300}")
        elif event in _CHANGING and not (self._inside(given[0]) or _by_descriptor(given)):
            self.found.append(f"{event} {given!r:.300}")

    def _leads_inside(self, path: Any) -> bool:
        """Return whether a directory is the allowed one, within it or above it."""
        if self._inside(path) or not os.path.isabs(str(path)):
            return str(path) != ".."
        return f"{self._allowed}/".startswith(os.path.realpath(path).rstrip("/") + "/")

    def _inside(self, path: Any) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return isinstance(path, int)
        return os.path.realpath(path).startswith(self._allowed) or path == os.devnull


def _is_new_and_plain(given: tuple[Any, ...]) -> bool:
    """Return whether a plain name is made in an open directory, which events don't name."""
    name, _, flags = given
    made = isinstance(flags, int) and flags & os.O_EXCL and flags & os.O_NOFOLLOW
    return bool(made) and isinstance(name, str) and "/" not in name and name not in (".", "..")


def _is_directory(given: tuple[Any, ...]) -> bool:
    return isinstance(given[2], int) and bool(given[2] & os.O_DIRECTORY)


def _writes(given: tuple[Any, ...]) -> bool:
    _, mode, flags = given
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _by_descriptor(given: tuple[Any, ...]) -> bool:
    return any(isinstance(one, int) and one >= 0 for one in given[1:])
