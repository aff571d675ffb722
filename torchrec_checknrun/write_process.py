"""A process of its own that encodes and writes, so that training shares no interpreter with it.

Started once per rank. It joins no collective, sees the rows in staging memory that it maps, and
ends with its parent, however that ends. What goes over the connection is between a process and its
own child; nothing from storage is ever unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_checknrun.chunks import EncodedChunk
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.picklable import picklable, picklable_errors
from torchrec_checknrun.rank_file import FileSummary, Job, write_rank_file
from torchrec_checknrun.retries import masked
from torchrec_checknrun.staged import Staged, StagedJob
from torchrec_checknrun.staging_memory import StagingMemory

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Training comes first."""


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
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), str(os.getpid()), str(threads)],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
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

        def listen() -> None:
            try:
                while (answer := self._connection.recv()) is None:
                    sent.get().close()
                outcome.append(answer)
            except (EOFError, OSError):
                outcome.append(self._dead())
            with contextlib.suppress(queue.Empty):
                while True:  # the next job may wait for the memory of those
                    sent.get_nowait().close()

        try:
            self._connection.send((folder.url, rank))
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
        with contextlib.suppress(OSError):
            self._connection.send(failure is None)
        listener.join()
        if failure is not None:
            raise failure
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        _require_written(folder, outcome[0])
        return outcome[0]

    @property
    def alive(self) -> bool:
        """Whether it can still write."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it; what it was writing stays uncommitted."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

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


def main(descriptor: int, parent: int, threads: int) -> None:
    """The process: writes one file after the other until its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    # Ctrl-C and a preemption's SIGTERM are the parent's to answer: it may want one more checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    torch.set_num_threads(threads)
    connection = Connection(descriptor)
    size = connection.recv()
    memory = StagingMemory(size, descriptor=recv_handle(connection)).bytes
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            url, rank = connection.recv()
            _write(connection, memory, url, rank)


def _write(connection: Connection, memory: torch.Tensor, url: str, rank: int) -> None:
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
        connection.send(write_rank_file(_open(url), rank, jobs()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        connection.send(picklable(error))  # at once: the parent may be waiting for memory
        while not ended:  # what the parent has sent in the meantime
            ended = isinstance(connection.recv(), bool)


def _open(url: str) -> Folder:
    try:
        return Folder(url)
    except OSError:
        raise
    except Exception as error:
        raise SaveFailed(
            f"the background process can't open {masked(url)} ({masked(repr(error))}), which the "
            "training process could. A file system that a program registers at run time is known "
            "to that program only: name it in the entry points fsspec.specs, or use "
            "background='thread'"
        ) from error


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
