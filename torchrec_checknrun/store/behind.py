"""Write a file in a thread of its own: the next bytes are made while the last are written.

At most one run of bytes waits for the storage: the maker of the next one is held up until then, so
that memory stays bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from torchrec_checknrun.errors import StorageUnreachable
from torchrec_checknrun.store.deadlines import Patience, silent
from torchrec_checknrun.store.file_copy import FileCopy
from torchrec_checknrun.store.new_file import NewFile

Bytes = bytes | memoryview


class WriteBehind:
    """A new file that a thread writes, one run of bytes after the other; see ``write_behind``."""

    def __init__(self, file: NewFile, patience: Patience, what: str, copy: FileCopy) -> None:
        self._file = file
        self._copy = copy
        self._patience = patience
        self._what = what
        self._running: Future[None] | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a write may wait for ever, for storage that never answers.
        thread = threading.Thread(target=self._run, name="checknrun-write", daemon=True)
        self._thread: threading.Thread | None = None
        with suppress(RuntimeError):  # the system, or an interpreter that ends, starts no thread
            thread.start()
            self._thread = thread

    def append(
        self,
        pieces: Iterable[Bytes],
        each: Callable[[Bytes], object] = lambda piece: None,
        done: Callable[[], object] = lambda: None,
    ) -> int:
        """Begin to write bytes, once the last ones are written; return their offset in the file.

        Args:
            each: called in the thread with each piece, before the piece is written.
            done: called in the thread at the end, even after a failure.

        Raises:
            OSError: the storage failed on the last bytes, or didn't answer.
        """
        self.flush()
        offset = self._file.tell()
        self._running = Future()
        if self._thread is None:
            # The exit of the interpreter sees if this hangs.
            with self._patience.watch(self._what) as beat:
                self._write(pieces, lambda piece: (each(piece), beat()), done, self._running)
        else:
            self._work.put(partial(self._write, pieces, each, done, self._running))
        return offset

    def flush(self) -> None:
        """Wait until all bytes are written; raise as ``append``."""
        if self._running is not None:
            running, self._running = self._running, None
            self._patience.result(running, self._what, self._file.tell)

    def close(self, seconds: float | None = None) -> bool:
        """End the thread.

        Args:
            seconds: the longest wait; None: until all bytes are written.

        Returns:
            Whether the thread has ended; if not, the thread is abandoned.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._work.put(None)
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # frees its memory before the next bytes come

    def _write(
        self,
        pieces: Iterable[Bytes],
        each: Callable[[Bytes], object],
        done: Callable[[], object],
        outcome: Future[None],
    ) -> None:
        try:
            try:
                for piece in pieces:
                    each(piece)
                    self._copy.write(piece)
                    self._file.write(piece)
            finally:
                done()
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)
            del outcome  # the future and its error would keep each other, and the bytes


@contextmanager
def write_behind(
    file: NewFile, patience: Patience, what: str, copy: FileCopy
) -> Iterator[WriteBehind]:
    """Write a file in a thread, until the block ends.

    After an error the thread is waited for, unless the storage hangs.

    Args:
        what: names the operation and the path in errors.
        copy: gets the same bytes.

    Raises:
        StorageUnreachable: the storage didn't answer in time.
    """
    behind = WriteBehind(file, patience, what, copy)
    try:
        yield behind
        behind.flush()
    except StorageUnreachable:
        behind.close(seconds=0)
        raise
    except BaseException as error:
        if not behind.close(seconds=patience.seconds):
            raise silent(what, patience.seconds, patience.timeout_seconds) from error
        raise
    behind.close()
