"""A write process per rank, which encodes and writes without sharing training's interpreter.

The process joins no collective, maps the staging memory with the rows, and ends with its parent,
however the parent ends. Messages over the connection are pickled, between a process and its own
child only; nothing from storage is ever unpickled.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
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
from torchrec_checknrun.ranks import picklable
from torchrec_checknrun.save.isolated_start import start
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.snapshot.staged import Staged, StagedJob
from torchrec_checknrun.store.deadlines import Patience, silent
from torchrec_checknrun.store.file_copy import NO_COPY, CopyTo
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.retry import masked

logger = logging.getLogger(__name__)

_NICENESS = 10
"""Training comes first."""
_READY = "ready"
"""The process's first message, after its imports."""
_START_SECONDS = 120.0
_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0
_MARGIN = 0.1
"""Extra time for the process to answer, beyond that for the storage, as a fraction of the timeout.
"""


@dataclass
class _Exchange:
    """The jobs and answers of one rank file.

    Attributes:
        sent: jobs that were sent and not answered yet.
        complete: set once all jobs were sent.
        outcome: the process's last answer, or why none will come; None until then.
    """

    sent: queue.SimpleQueue[Job] = field(default_factory=queue.SimpleQueue)
    complete: threading.Event = field(default_factory=threading.Event)
    outcome: FileSummary | Exception | None = None

    @property
    def idle(self) -> bool:
        """Return True while no answer is due."""
        return self.sent.empty() and not self.complete.is_set()


class WriteProcess:
    """The parent's end of a write process, whose ``write`` replaces ``write_rank_file``.

    Create this in a thread that lives as long as the process may be needed: on Linux a child ends
    with the thread that started it.

    Args:
        memory: shared staging memory, which the process maps.
        threads: number of torch threads in the process.

    Raises:
        SaveFailed: the process can't be started.
    """

    def __init__(self, memory: StagingMemory, threads: int = 1) -> None:
        ours, its = socket.socketpair()
        try:
            with its:
                self._process = start(__name__, its.fileno(), threads, descriptors=(its.fileno(),))
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._ready = False
        self.pid = self._process.pid
        self._map(memory)

    def _map(self, memory: StagingMemory) -> None:
        assert memory.descriptor is not None, "staging memory is not shared"
        self._connection.send(memory.size)
        send_handle(self._connection, memory.descriptor, self.pid)

    def write(
        self, folder: Folder, rank: int, jobs: Iterable[Job], copy: CopyTo = NO_COPY
    ) -> FileSummary:
        """Write a rank file of staged jobs; see ``write_rank_file``.

        Raises:
            SaveFailed: the process has died, or writes to storage that this process can't see.
            Exception: an error of the process, or of ``jobs``.
        """
        require_shared(folder)
        root, names = folder.outermost
        try:
            self._connection.send((root, names, folder.patience.timeout_seconds, rank, copy))
        except OSError:
            raise self._dead() from None
        exchange = _Exchange()
        listener = threading.Thread(
            target=self._listen,
            args=(exchange, f"writing {folder}/rank-{rank:05d}.bin", folder.patience),
            name="checknrun-listen",
            daemon=True,
        )
        listener.start()
        failure = self._send(exchange, jobs)
        exchange.complete.set()
        with contextlib.suppress(OSError):
            self._connection.send(failure is None)
        listener.join()  # the listener ends a process that doesn't answer
        if failure is not None:
            raise failure
        if isinstance(exchange.outcome, Exception):
            raise exchange.outcome
        assert exchange.outcome is not None
        _require_written(folder, exchange.outcome)
        return exchange.outcome

    def _send(self, exchange: _Exchange, jobs: Iterable[Job]) -> BaseException | None:
        """Send the jobs until the process has failed; return the error of ``jobs``, if any."""
        try:
            for job in jobs:
                assert isinstance(job, StagedJob)
                exchange.sent.put(job)
                if exchange.outcome is not None:
                    break
                try:
                    self._connection.send(job.staged)
                except OSError:
                    break  # the listener finds the cause
        except BaseException as error:
            return error
        return None

    def _listen(self, exchange: _Exchange, activity: str, patience: Patience) -> None:
        """Close jobs as they are written, until the process has sent the outcome or failed.

        Args:
            activity: what the process does, for errors.
        """
        try:
            with patience.watch(activity) as beat:
                while (answer := self._receive(exchange, beat, patience)) is None:
                    exchange.sent.get().close()
            exchange.outcome = answer
        except TimeoutError:
            self._end()
            exchange.outcome = silent(activity, patience.seconds, patience.timeout_seconds)
        except (EOFError, OSError):
            exchange.outcome = self._dead()
        with contextlib.suppress(queue.Empty):
            while True:  # the next job may wait for the memory of these
                exchange.sent.get_nowait().close()

    def _receive(
        self, exchange: _Exchange, beat: Callable[[], None], patience: Patience
    ) -> FileSummary | Exception | None:
        """Return the next answer: None for a job that is written, or the outcome.

        Args:
            beat: called at every sign of life.

        Raises:
            TimeoutError: an answer is due and has not come for too long.
        """
        heard = time.monotonic()
        while True:
            # The process itself gives up silent storage a little earlier.
            limit = patience.seconds + _MARGIN * patience.timeout_seconds
            if not self._ready:
                limit = max(limit, _START_SECONDS)
            if self._connection.poll(_LOOK_SECONDS):
                answer = self._connection.recv()
                beat()
                if answer != _READY:
                    return answer
                self._ready, heard = True, time.monotonic()
            elif exchange.idle:
                heard = time.monotonic()
                beat()
            elif time.monotonic() - heard > limit:
                raise TimeoutError
            elif not self._ready:
                beat()  # the process still imports: no storage is silent

    @property
    def alive(self) -> bool:
        """Return True while the process can still write."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; a file in progress stays uncommitted."""
        self._end()
        self._connection.close()
        self._socket.close()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # senders get an error
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the background process %d was killed and has not ended yet: its disk doesn't "
                "answer",
                self.pid,
            )

    def _dead(self) -> SaveFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return SaveFailed(
            f"the background process {self.pid} died (exit status {self._process.returncode}); the "
            "next checkpoint starts a new one. If the system killed this one, memory may be short"
        )


def require_shared(folder: Folder) -> None:
    """Refuse a folder that only this process sees: the child's files would be lost with the child.

    Raises:
        SaveFailed: the folder lies in this process's memory.
    """
    filesystem, _ = fsspec.core.url_to_fs(folder.url)
    while isinstance(filesystem, AbstractFileSystem):
        if isinstance(filesystem, MemoryFileSystem):
            raise SaveFailed(
                f"{folder} lies in this process's memory ({type(filesystem).__name__}), where "
                "background='process' can't write: use background='thread', or a root that all "
                "processes see"
            )
        filesystem = getattr(filesystem, "fs", None)  # of a cache, or a folder within


def _require_written(folder: Folder, summary: FileSummary) -> None:
    size = folder.size(summary.file.name)
    if size != summary.file.size:
        raise SaveFailed(
            f"{folder}/{summary.file.name}: the background process wrote {summary.file.size} bytes "
            f"there, of which this process sees {size or 'none'}: use background='thread', or a "
            "root that all processes see"
        )


class _RemoteJob:
    """A job in the write process."""

    def __init__(self, staged: Staged, memory: torch.Tensor, done: Callable[[], None]) -> None:
        self._staged = staged
        self._memory = memory
        self._done = done

    def encode(self) -> EncodedChunk:
        return self._staged.encode(self._memory)

    def close(self) -> None:
        self._done()


def main(descriptor: int, threads: int) -> None:
    """Run the write process: write one file after the other until the parent is gone."""
    os.nice(_NICENESS)
    torch.set_num_threads(threads)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        size = connection.recv()
        memory = StagingMemory(size, descriptor=recv_handle(connection)).bytes
        connection.send(_READY)
        while True:
            root, names, timeout_seconds, rank, copy = connection.recv()
            opened = partial(_open, root, names, timeout_seconds)
            _write(connection, memory, opened, rank, copy)


def _write(
    connection: Connection,
    memory: torch.Tensor,
    opened: Callable[[], Folder],
    rank: int,
    copy: CopyTo,
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
        connection.send(write_rank_file(opened(), rank, jobs(), copy))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        connection.send(picklable(error))  # at once: the parent may be waiting for memory
        while not ended:  # drop the messages that the parent has sent in the meantime
            ended = isinstance(connection.recv(), bool)
        if isinstance(error, StorageUnreachable):
            os._exit(1)  # a hanging thread's late answer would come between other answers


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
            "training process could. A file system registered at run time is known to one process "
            "only: name it in the entry points fsspec.specs, or use background='thread'"
        ) from error
