"""A process of its own that encodes and writes, so that training shares no interpreter with it.

Started once per rank. It joins no collective, sees the rows in staging memory that it maps, and
ends with its parent, however that ends. What goes over the connection is between a process and its
own child; nothing from storage is ever unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_checknrun.errors import SaveFailed, StorageUnreachable
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.rank_file import FileSummary, Job, write_rank_file
from torchrec_checknrun.ranks import picklable, picklable_errors
from torchrec_checknrun.save.isolated_start import start
from torchrec_checknrun.save.memory import StagingMemory
from torchrec_checknrun.save.staged import Staged, StagedJob
from torchrec_checknrun.store.deadlines import Patience, silent
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import masked

logger = logging.getLogger(__name__)

_NICENESS = 10
"""Training comes first."""
_READY = "ready"
"""Its first message: its imports are done."""
_START_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0
_MARGIN = 0.1
"""Of the timeout: the process has so much longer to answer than the storage has."""


class WriteProcess:
    """The parent's side: ``write`` takes the place of ``write_rank_file``.

    To be made in a thread that lives as long as the process may be needed: on Linux a child ends
    with the thread that started it.

    Args:
        threads: of torch in the process.
    """

    def __init__(self, memory: StagingMemory, threads: int = 1) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = start(__name__, its.fileno(), threads, descriptors=(its.fileno(),))
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._ready = False
        self.pid = self._process.pid
        self._map(memory)

    def _map(self, memory: StagingMemory) -> None:
        assert memory.descriptor is not None, "staging memory is not shared"
        self._connection.send(memory.size)
        send_handle(self._connection, memory.descriptor, self.pid)

    @picklable_errors()  # DCP sends them to rank 0
    def write(self, folder: Folder, rank: int, jobs: Iterator[Job]) -> FileSummary:
        """As ``write_rank_file``, of staged jobs.

        Raises:
            SaveFailed: the process has died, or writes where this one can't see it.
            Exception: what went wrong there, or in ``jobs``.
        """
        require_shared(folder)
        sent: queue.SimpleQueue[Job] = queue.SimpleQueue()
        outcome: list[FileSummary | Exception] = []
        what, patience = f"writing {folder}/rank-{rank:05d}.bin", folder.patience
        asked = threading.Event()  # something that is not in ``sent``

        def idle() -> bool:
            return sent.empty() and not asked.is_set()

        def listen() -> None:
            try:
                with patience.watch(what) as beat:
                    while (
                        answer := self._receive(
                            lambda: sent.empty() and not asked.is_set(), beat, patience
                        )
                    ) is None:
                        sent.get().close()
                outcome.append(answer)
            except TimeoutError:
                self._end()
                outcome.append(silent(what, patience.seconds, patience.timeout_seconds))
            except (EOFError, OSError):
                outcome.append(self._dead())
            with contextlib.suppress(queue.Empty):
                while True:  # the next job may wait for the memory of those
                    sent.get_nowait().close()

        root, names = folder.outermost
        try:
            self._connection.send((root, names, patience.timeout_seconds, rank))
        except OSError:
            raise self._dead() from None
        listener = threading.Thread(target=listen, daemon=True, name="checknrun-listen")
        listener.start()
        failure: BaseException | None = None
        try:
            for job in jobs:
                assert isinstance(job, StagedJob)
                sent.put(job)
                if outcome:
                    break
                self._connection.send(job.staged)
        except OSError:
            pass  # the listener knows more
        except BaseException as error:
            failure = error
        asked.set()
        with contextlib.suppress(OSError):
            self._connection.send(failure is None)
        listener.join()  # it ends what doesn't answer
        if failure is not None:
            raise failure
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        _require_written(folder, outcome[0])
        return outcome[0]

    def _receive(
        self, idle: Callable[[], bool], beat: Callable[[], None], patience: Patience
    ) -> FileSummary | Exception | None:
        """Return the next answer.

        Args:
            idle: whether none is due.
            beat: called at every sign of life.

        Raises:
            TimeoutError: none has come for too long.
        """
        heard = time.monotonic()
        while True:
            # The process itself gives up a storage that is silent, a little earlier.
            limit = patience.seconds + _MARGIN * patience.timeout_seconds
            if not self._ready:
                limit = max(limit, _START_SECONDS)
            if self._connection.poll(_LOOK_SECONDS):
                answer = self._connection.recv()
                beat()
                if answer != _READY:
                    return answer
                self._ready, heard = True, time.monotonic()
            elif idle():
                heard = time.monotonic()
                beat()
            elif time.monotonic() - heard > limit:
                raise TimeoutError

    @property
    def alive(self) -> bool:
        """Whether it can still write."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it; what it was writing stays uncommitted."""
        self._end()
        self._connection.close()
        self._socket.close()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever sends to it is told
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the background process %d was killed and has not ended yet: it waits for a disk "
                "that doesn't answer",
                self.pid,
            )

    def _dead(self) -> SaveFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return SaveFailed(
            f"the background process {self.pid} died (exit status {self._process.returncode}); it "
            "is started anew for the next checkpoint. If the system killed it, memory may be short"
        )


def require_shared(folder: Folder) -> None:
    """Refuses what each process has for itself: a rank's file would end with the process.

    Raises:
        SaveFailed: the folder lies in this process's memory.
    """
    filesystem, _ = fsspec.core.url_to_fs(folder.url)
    while isinstance(filesystem, AbstractFileSystem):
        if isinstance(filesystem, MemoryFileSystem):
            raise SaveFailed(
                f"{folder} lies in this process's memory ({type(filesystem).__name__}), where "
                "background='process' can't write; it needs a store that all processes see: use "
                "background='thread', or another root"
            )
        filesystem = getattr(filesystem, "fs", None)  # of a cache, or a folder within


def _require_written(folder: Folder, summary: FileSummary) -> None:
    size = folder.size(summary.file.name)
    if size != summary.file.size:
        raise SaveFailed(
            f"{folder}/{summary.file.name}: the background process wrote {summary.file.size} bytes "
            f"there, of which this process sees {size or 'none'}; background='process' needs a "
            "store that all processes see: use background='thread', or another root"
        )


class _RemoteJob:
    """A job as the process sees it."""

    def __init__(self, staged: Staged, memory: torch.Tensor, done: Callable[[], None]) -> None:
        self._staged = staged
        self._memory = memory
        self._done = done

    def encode(self) -> EncodedChunk:
        return self._staged.encode(self._memory)

    def close(self) -> None:
        self._done()


def main(descriptor: int, threads: int) -> None:
    """The process: writes one file after the other until its parent is gone."""
    os.nice(_NICENESS)
    torch.set_num_threads(threads)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        size = connection.recv()
        memory = StagingMemory(size, descriptor=recv_handle(connection)).bytes
        connection.send(_READY)
        while True:
            root, names, timeout_seconds, rank = connection.recv()
            _write(connection, memory, partial(_open, root, names, timeout_seconds), rank)


def _write(
    connection: Connection, memory: torch.Tensor, opened: Callable[[], Folder], rank: int
) -> None:
    ended = False

    def jobs() -> Iterator[Job]:
        nonlocal ended
        while True:
            message: Any = connection.recv()
            if isinstance(message, bool):
                ended = True
                if message:
                    return
                raise InterruptedError("the parent has given up")
            yield _RemoteJob(message, memory, lambda: connection.send(None))

    try:
        connection.send(write_rank_file(opened(), rank, jobs()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        connection.send(picklable(error))  # at once: the parent may be waiting for memory
        while not ended:  # what the parent has sent in the meantime
            ended = isinstance(connection.recv(), bool)
        if isinstance(error, StorageUnreachable):
            os._exit(1)  # a thread that hangs would answer some day, in between others


def _open(url: str, names: tuple[str, ...], timeout_seconds: float) -> Folder:
    try:
        folder = Folder(url, timeout_seconds)
        for name in names:
            folder /= name
        return folder
    except OSError:
        raise
    except Exception as error:
        raise SaveFailed(
            f"the background process can't open {masked(url)} ({masked(repr(error))}), which the "
            "training process could. A file system that a program registers at run time is known "
            "to that program only: name it in the entry points fsspec.specs, or use "
            "background='thread'"
        ) from error
