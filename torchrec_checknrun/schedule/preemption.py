"""Handle SIGTERM: tell a preemption from a peer that has died, and end the process in time.

A preempted job may save once more, and all its ranks are there to do so. But when a worker has
died, torchrun sends SIGTERM to the workers that are left, and they may be stuck waiting for the
dead one. So the ranks call the roll, again and again, in threads that no collective can block.

SIGTERM is heard at once, even while the main thread is stuck in C++, where Python's handlers wait:
the interpreter's C handler writes the signal's number to a socket as soon as the signal comes, and
a thread that reads the socket can act without disturbing the main thread.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed import DistError, Store

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code that a shell reports of a process ended by SIGTERM."""
PATIENCE_SECONDS = 1.5
"""Seconds that a roll call waits for an answer. With the goodbye, less than 2 seconds."""
_PAUSE_SECONDS = 0.5
"""Seconds between two looks for another rank's SIGTERM, and between two roll calls."""
_GOODBYE_SECONDS = 0.3
_TICK_SECONDS = 0.1


class Preemption:
    """A listener for SIGTERM on any rank that ends this process in time.

    From the first SIGTERM on, a rank that doesn't answer for ``PATIENCE_SECONDS`` makes the others
    exit, and so does the end of the grace time; both with SIGTERM's exit code, and without
    unwinding the main thread, which may be stuck. Only ``end`` unwinds the main thread.

    Construct it on all ranks at once; a rank hears the signal only if constructed in its main
    thread.

    Args:
        store: for a thread of its own; no other code uses its keys. None: one rank alone.
        grace_seconds: seconds from the signal to the exit.
    """

    def __init__(self, store: Store | None, world_size: int, grace_seconds: float) -> None:
        self._world_size = world_size
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._all_here = threading.Event()
        self._news = threading.Event()  # SIGTERM was heard, or there will be no roll call
        self._no_more_rolls = threading.Event()
        self._leaves = False
        self._closed = False
        self._clock_stopped = False
        self._answers = 0
        self._grace_ends = math.inf
        self._lost_at = math.inf
        self._sigterm = Sigterm()
        self._roll_call: threading.Thread | None = None
        if store is not None:
            self._roll_call = _thread("checknrun-roll-call", self._call_roll, store)
            # A thread that returns from C++ while the interpreter ends would abort the process.
            atexit.register(self._stop_roll_call)
        _thread("checknrun-sigterm", self._keep_time)

    @property
    def heard(self) -> bool:
        """Return whether some rank has received SIGTERM, as far as known here."""
        return self._heard.is_set()

    @property
    def all_here(self) -> bool:
        """Return whether all ranks have answered since a SIGTERM, and so can still save."""
        return self._all_here.is_set()

    @property
    def remaining_seconds(self) -> float:
        """Return the seconds left of the grace time; infinite before any SIGTERM."""
        return max(0.0, self._grace_ends - time.monotonic())

    def end(self) -> None:
        """End the process like SIGTERM would have: run the previous handler.

        If that handler returns, the process goes on undisturbed. Without a handler, the grace time
        still limits everything that the exit runs.

        Raises:
            SystemExit: there was no Python handler.
        """
        self._stop_roll_call(leaves=True)
        self._sigterm.restore()
        self._sigterm.act()
        self._stop_clock()

    def close(self, failed: bool = False) -> None:
        """Restore SIGTERM's handler; after a SIGTERM, end the process as ``end`` does.

        Args:
            failed: whether an exception is on its way out and ends the process in its own way. If
                the exception doesn't, after a SIGTERM, the grace time does.

        Raises:
            SystemExit: as ``end``.
        """
        if self._closed:
            return
        self._closed = True
        self._sigterm.restore()
        if self.heard and not failed:
            self.end()
        elif not self.heard:
            self._stop_roll_call(leaves=not failed)
            self._stop_clock()

    def _hear(self, to_whom: str) -> None:
        with self._lock:
            if self.heard:
                return
            now = time.monotonic()
            self._grace_ends = now + self._grace_seconds
            if self._roll_call is None:
                self._all_here.set()
            else:
                self._lost_at = now + PATIENCE_SECONDS
            self._heard.set()
        self._news.set()
        self._sigterm.wake()
        # In a thread of its own: the main thread may be stuck with the lock of a stream.
        with suppress(RuntimeError):  # no thread to be had; this one is still to keep the time
            _thread("checknrun-log", logger.warning, "SIGTERM to %s: calling the roll", to_whom)

    def _keep_time(self) -> None:
        """Hear the signal and exit at a deadline, in a thread that depends on no other."""
        while not self._clock_stopped:
            if self._sigterm.wait(_TICK_SECONDS if self.heard else None):
                self._hear("this process")
            now = time.monotonic()
            if now >= self._lost_at:
                _exit(f"only {self._answers} of {self._world_size} ranks answer after SIGTERM")
            if now >= self._grace_ends:
                _exit(f"SIGTERM was {self._grace_seconds:g} seconds ago")
        self._sigterm.dispose()

    def _call_roll(self, store: Store) -> None:
        """Call the roll in a thread that may wait for the store; ``_keep_time`` acts on silence."""
        with suppress(DistError):  # the store's process has ended
            while not self._news.wait(_PAUSE_SECONDS):
                if store.check(["sigterm"]):
                    self._hear("another rank")
            if self.heard:
                store.set("sigterm", "")
            number = 0
            while not self._no_more_rolls.is_set():
                store.add(f"here/{number}", 1)
                self._await_answers(store, f"here/{number}")
                self._no_more_rolls.wait(_PAUSE_SECONDS)
                number += 1
            if self._leaves:
                if number:
                    store.add(f"here/{number - 1}", -1)  # else counted twice
                store.add("left", 1)

    def _await_answers(self, store: Store, roll: str) -> None:
        while True:
            self._answers = store.add(roll, 0) + store.add("left", 0)
            if self._answers >= self._world_size:
                break
            if self._no_more_rolls.wait(_TICK_SECONDS / 2):
                return
        with self._lock:
            if not self._no_more_rolls.is_set():
                self._lost_at = time.monotonic() + _PAUSE_SECONDS + PATIENCE_SECONDS
                self._all_here.set()

    def _stop_roll_call(self, leaves: bool = False) -> None:
        """Stop calling the roll.

        Args:
            leaves: whether to tell the other ranks that this rank's silence is no loss.
        """
        atexit.unregister(self._stop_roll_call)
        with self._lock:
            self._leaves = self._leaves or leaves
            self._no_more_rolls.set()
            self._lost_at = math.inf
        self._news.set()
        if self._roll_call is not None:
            self._roll_call.join(_GOODBYE_SECONDS)

    def _stop_clock(self) -> None:
        self._clock_stopped = True
        self._sigterm.wake()


class Sigterm:
    """The handling of SIGTERM, taken over from construction until ``restore``.

    Outside of the main thread, and over a handler that is not Python's, nothing is taken over, with
    a warning. A forked child gets the previous handler back.
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
                "%s: this process will not save when it gets SIGTERM; make it in the main thread",
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
        """Wait for SIGTERM, ``wake`` or a timeout; return whether SIGTERM has come."""
        arrivals = select.poll()  # unlike ``select``, for any number of open files
        arrivals.register(self._reader, select.POLLIN)
        ready = arrivals.poll(None if seconds is None else 1000 * seconds)
        return bool(ready) and signal.SIGTERM in self._reader.recv(4096)

    def wake(self, number: int = 0) -> None:
        """Make ``wait`` return in its thread."""
        with suppress(OSError):  # full: ``wait`` will return anyway
            self._writer.send(bytes([number]))

    def act(self) -> None:
        """Act like SIGTERM would have: run the previous handler.

        Raises:
            SystemExit: with SIGTERM's exit code; there was no handler.
        """
        if callable(self._previous):
            self._previous(int(signal.SIGTERM), None)  # as the interpreter calls it
        else:
            raise SystemExit(EXIT_CODE)

    def restore(self) -> None:
        """Reinstall the previous handler, unless other code has installed its own since."""
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
        """Close the socket, once no thread waits for it any more."""
        if not self._is_wakeup:
            self._reader.close()
            self._writer.close()

    def _install(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        # C++ code in the main thread was written for a process that SIGTERM ends: none of its
        # calls may be interrupted by the signal.
        signal.siginterrupt(signal.SIGTERM, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.installed = self._is_wakeup = True
        _installed.add(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, whenever that gets to it.

        Mostly the reading thread has heard the signal long before, unless another wakeup file
        descriptor was set meanwhile (by asyncio, say).
        """
        if self.installed:
            self.wake(signal.SIGTERM)
        else:
            self.act()


def _thread(name: str, run: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, args=arguments, daemon=True)
    thread.start()
    return thread


def _exit(reason: str) -> None:
    """Exit at once; log the reason if no thread holds the locks of the streams."""

    def say_goodbye() -> None:
        logger.critical("exiting at once: %s", reason)
        for handler in logging.getLogger().handlers + logger.handlers:
            handler.flush()
        sys.stdout.flush()
        sys.stderr.flush()

    _thread("checknrun-goodbye", say_goodbye).join(_GOODBYE_SECONDS)
    os._exit(EXIT_CODE)


_installed: weakref.WeakSet[Sigterm] = weakref.WeakSet()


def _restore_in_child() -> None:
    # The child shares the parent's socket: the parent would hear the child's signals.
    for sigterm in list(_installed):
        sigterm.restore()


os.register_at_fork(after_in_child=_restore_in_child)
