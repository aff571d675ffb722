"""Put a gate between a checkpointer and its storage, which holds or fails what passes.

The gate stands in the workers, on every rank, and reaches into a rank file as well as behind the
commit.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.sequence_model import Point, Way
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.save import background
from torchrec_checknrun.save.background import Background
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.process import WriteProcess
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.new_file import NewFile

PATIENCE = 60.0
"""Seconds until a test that hangs says so."""


class Passage:
    """One checkpoint's way to the storage, on this rank."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.save: Save | None = None
        self.on_write = False
        self.cut_short = False
        self._let_go = threading.Event()
        self._reached = threading.Event()

    def at(self, point: Point) -> None:
        """Hold or fail the checkpoint at this point, if its way says so."""
        if self.way.holds(point, dist.get_rank()):
            self._reached.set()
            assert self._let_go.wait(PATIENCE), f"held at {point!r} for good"
            if self.cut_short:
                raise OSError("the process is gone, says the test")
        if self.way.fails(point, dist.get_rank()):
            raise OSError(errno.ENOSPC, "no space left, says the test")

    def let_go(self) -> None:
        self._let_go.set()

    def wait(self) -> None:
        """Wait until the checkpoint is held, or at its end, on all ranks."""
        hold, rank = self.way.hold, dist.get_rank()
        if hold is None or (hold is Point.HEARD and rank != self.way.hold_rank):
            self.wait_for_end()
        elif hold not in (Point.MANIFEST, Point.COMMITTED) or rank == 0:
            assert self._reached.wait(PATIENCE), f"{hold!r} is not reached"
        dist.barrier()

    def wait_for_end(self) -> None:
        assert self.save is not None
        assert self.save.known.wait(PATIENCE), "the save does not end"
        self.save.common_step.settled()  # so that the next step hears of it


class Gate:
    """A patch of every function that a save goes through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.next = Way()
        self.passage: Passage | None = None
        begin, save = Background.begin, background.save_checkpoint
        write_file, write, put = CheckpointWriter.write, Folder.write, Folder.put
        write_there = WriteProcess.write

        def begin_here(here: Background, *args: Any, **kwargs: Any) -> Save:
            self.passage = passage = Passage(self.next)
            passage.on_write = here.memory.on_write is not None
            passage.save = begin(here, *args, **kwargs)
            return passage.save

        def hear(*args: Any, **kwargs: Any) -> Any:
            passage = self.passage
            manifest = save(*args, **kwargs)
            if passage is not None:
                passage.at(Point.HEARD)
            return manifest

        def write_file_here(writer: CheckpointWriter, *args: Any) -> Any:
            self._at(Point.FILE)
            return write_file(writer, *args)

        @contextmanager
        def write_here(folder: Folder, name: str) -> Iterator[Any]:
            with write(folder, name) as file:
                yield _Torn(file, self._at)

        def put_here(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
            if name != MANIFEST_NAME:
                put(folder, name, data, new)
                return
            self._at(Point.MANIFEST)
            put(folder, name, data, new)
            self._at(Point.COMMITTED)

        def killing(process: WriteProcess, jobs: Iterator[Any]) -> Iterator[Any]:
            yield from itertools.islice(jobs, 1)
            try:
                self._at(Point.IN_FILE)
            except OSError:
                os.kill(process.pid, signal.SIGKILL)
            yield from jobs

        def write_there_or_die(
            process: WriteProcess, folder: Folder, rank: int, jobs: Iterator[Any]
        ) -> Any:
            return write_there(process, folder, rank, killing(process, jobs))

        patch.setattr(Background, "begin", begin_here)
        patch.setattr(background, "save_checkpoint", hear)
        patch.setattr(CheckpointWriter, "write", write_file_here)
        patch.setattr(Folder, "write", write_here)
        patch.setattr(Folder, "put", put_here)
        patch.setattr(WriteProcess, "write", write_there_or_die)

    def _at(self, point: Point) -> None:
        if self.passage is not None:
            self.passage.at(point)


class _Torn:
    """A file whose second write may fail: only its beginning is written then."""

    def __init__(self, file: NewFile, at: Callable[[Point], None]) -> None:
        self._file = file
        self._at = at
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        self._writes += 1
        if self._writes == 2:  # an index and a footer are in every file
            self._at(Point.IN_FILE)
        return self._file.write(data)
