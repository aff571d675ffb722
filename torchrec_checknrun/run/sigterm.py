"""Hears SIGTERM at once, even while the main thread is stuck in C++, where Python's handlers wait.

The interpreter's C handler writes the signal's number to a socket as soon as it comes; a thread
that reads it can act. The main thread is not disturbed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended."""


class Sigterm:
    """Takes SIGTERM over until it is closed.

    Outside of the main thread, and over a handler that is not Python's, it takes nothing over and
    warns. A forked child gets back what was there before.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: Any = None
        self._previous_fd = -1
        self.installed = False
        self._is_wakeup = False
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "SIGTERM can be handled in the main thread only, and the checkpointer is made in "
                "%s: this process will not save when it gets SIGTERM",
                threading.current_thread().name,
            )
        elif signal.getsignal(signal.SIGTERM) is None:
            logger.warning(
                "SIGTERM has a handler that was not installed from Python, which is left alone: "
                "this process will not save when it gets SIGTERM"
            )
        else:
            self._install()

    def wait(self, seconds: float | None) -> bool:
        """Returns after so many seconds, or at ``wake``, or when SIGTERM comes: then True."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and signal.SIGTERM in self._reader.recv(4096)

    def wake(self, number: int = 0) -> None:
        """Makes ``wait`` return in its thread."""
        with suppress(OSError):  # full: it will return anyway
            self._writer.send(bytes([number]))

    def act(self) -> None:
        """What SIGTERM would have done: runs the handler before this one.

        Raises:
            SystemExit: with SIGTERM's exit code; there was no handler.
        """
        if callable(self._previous):
            self._previous(int(signal.SIGTERM), None)  # as the interpreter calls it
        else:
            raise SystemExit(EXIT_CODE)

    def restore(self) -> None:
        """Puts back what was there before; what others have installed since stays."""
        if not self.installed:
            return
        self.installed = False
        if threading.current_thread() is not threading.main_thread():
            return  # not allowed here: ``_handle`` passes the signal on, the socket stays open
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        current = signal.set_wakeup_fd(-1)
        if current == self._writer.fileno():
            current = self._previous_fd
        with suppress(OSError, ValueError):  # it was closed meanwhile
            signal.set_wakeup_fd(current)
        self._is_wakeup = False

    def dispose(self) -> None:
        """Closes the socket, which nobody waits for any more."""
        if not self._is_wakeup:
            self._reader.close()
            self._writer.close()

    def _install(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        # C++ code in the main thread was written for a process that SIGTERM ends: no call of its
        # is to be interrupted by it.
        signal.siginterrupt(signal.SIGTERM, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.installed = self._is_wakeup = True
        _installed.add(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Makes the interpreter take the signal; runs when the main thread gets to it.

        Mostly the reading thread has heard of it long before, unless another wakeup file
        descriptor was set meanwhile (by asyncio, say).
        """
        if self.installed:
            self.wake(signal.SIGTERM)
        else:
            self.act()


_installed: weakref.WeakSet[Sigterm] = weakref.WeakSet()


def _restore_in_child() -> None:
    # Its signals would be heard by the parent: the socket is the same one.
    for sigterm in list(_installed):
        sigterm.restore()


os.register_at_fork(after_in_child=_restore_in_child)
