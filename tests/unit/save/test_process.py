"""Write in a process: the same file, errors are reported, and it never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from recipes.dlrm_criteo.job import is_alive
from tests.examples import some_of
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.rank_file import FileSummary, Job, write_rank_file
from torchrec_checknrun.save.process import WriteProcess
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.snapshot.staged import StagedJob, StagedRows, rows_size
from torchrec_checknrun.store.deadlines import longest_silence
from torchrec_checknrun.store.folder import Folder

ROWS, DIM, CHUNKS = 50, 8, 6


@pytest.fixture(scope="module")
def memory() -> Iterator[StagingMemory]:
    memory = StagingMemory(1 << 20, shared=True)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def process(memory: StagingMemory) -> Iterator[WriteProcess]:
    process = WriteProcess(memory)
    yield process
    process.close()
    assert not is_alive(process.pid)


def jobs(
    memory: StagingMemory, closed: list[int], each: Callable[[int], None] = lambda i: None
) -> Iterator[Job]:
    generator = torch.Generator().manual_seed(0)
    shard = LocalShard(
        "t",
        TableShape(ROWS * CHUNKS, DIM),
        Rectangle(0, ROWS * CHUNKS, 0, DIM),
        torch.randn((ROWS * CHUNKS, DIM), generator=generator),
        {"momentum1": torch.rand(ROWS * CHUNKS, generator=generator)},
    )
    size = rows_size(shard, ROWS)
    for i in range(CHUNKS):
        each(i)
        staged = StagedRows.plan(shard, ROWS, TableEncoding(Rowwise(4)), i * size)
        staged.copy(shard, torch.arange(i * ROWS, (i + 1) * ROWS), memory.bytes)
        yield StagedJob(staged, memory.bytes, partial(closed.append, i))


def test_it_writes_what_a_thread_writes(
    process: WriteProcess, memory: StagingMemory, tmp_path: Path
) -> None:
    here, there = Folder(tmp_path / "here"), Folder(tmp_path / "there")
    here.create()
    there.create()
    closed_here: list[int] = []
    closed_there: list[int] = []
    started = time.monotonic()
    first = write_rank_file(here, 3, jobs(memory, closed_here))
    second = process.write(there, 3, jobs(memory, closed_there))
    assert closed_here == closed_there == list(range(CHUNKS))
    assert first.file == second.file
    assert first.tables == second.tables
    assert here.read(first.file.name) == there.read(first.file.name)
    assert started < first.encoded_at <= first.written_at <= second.encoded_at
    assert second.encoded_at <= second.written_at <= time.monotonic()


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_errors_come_back_and_it_goes_on(
    process: WriteProcess, memory: StagingMemory, tmp_path: Path, error: type[Exception]
) -> None:
    with pytest.raises(FileNotFoundError):
        process.write(Folder(tmp_path / "missing"), 0, jobs(memory, []))

    def fail(i: int) -> None:
        if i == 3:
            raise error("not staged, says the test")

    with pytest.raises(error, match="not staged"):
        process.write(Folder(tmp_path), 1, jobs(memory, [], fail))
    assert process.write(Folder(tmp_path), 2, jobs(memory, [])).file.chunks == CHUNKS


def test_a_process_that_still_imports_is_no_silent_storage(
    memory: StagingMemory, tmp_path: Path
) -> None:
    """Allow slow imports, although an exit gives up a save whose storage is silent for seconds."""
    starting = WriteProcess(memory)
    os.kill(starting.pid, signal.SIGSTOP)
    silences: list[float] = []
    summaries: list[FileSummary] = []
    writer = threading.Thread(
        target=lambda: summaries.append(starting.write(Folder(tmp_path), 0, jobs(memory, [])))
    )
    writer.start()
    for _ in range(30):
        time.sleep(0.1)
        silences.append(longest_silence()[0])
    os.kill(starting.pid, signal.SIGCONT)
    writer.join()
    starting.close()
    assert max(silences) < 2.0
    assert summaries[0].file.chunks == CHUNKS


class OnlyHere(DirFileSystem):
    """A codec known only to the process that registers it."""

    protocol = "only-here"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem())


def test_a_file_system_that_only_its_parent_knows(
    process: WriteProcess, memory: StagingMemory, tmp_path: Path
) -> None:
    fsspec.register_implementation("only-here", OnlyHere, clobber=True)
    folder = Folder(f"only-here:/{tmp_path}")
    write_rank_file(folder, 0, jobs(memory, []))
    closed: list[int] = []
    with pytest.raises(SaveFailed, match=r"can't open only-here.*Protocol not known.*'thread'"):
        process.write(folder, 1, jobs(memory, closed))
    assert process.write(Folder(tmp_path), 2, jobs(memory, [])).file.chunks == CHUNKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.bin", "rank-00002.bin"]


class OwnMemory(MemoryFileSystem):
    protocol = "own-memory"


@pytest.mark.parametrize(
    "url", ["memory://run", "own-memory://run", "simplecache::memory://run", "dir::memory://run"]
)
def test_memory_of_one_process_is_refused(
    process: WriteProcess, memory: StagingMemory, url: str
) -> None:
    fsspec.register_implementation("own-memory", OwnMemory, clobber=True)
    with pytest.raises(SaveFailed, match=r"this process's memory.*background='thread'"):
        process.write(Folder(url), 0, jobs(memory, []))


def test_a_file_that_its_parent_does_not_see(
    process: WriteProcess, memory: StagingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "size", lambda folder, name: None)
    with pytest.raises(SaveFailed, match=r"rank-00000.bin.* bytes there.*sees none"):
        process.write(Folder(tmp_path), 0, jobs(memory, []))


def test_signals_are_its_parents_to_answer(
    process: WriteProcess, memory: StagingMemory, tmp_path: Path
) -> None:
    def signal_it(i: int) -> None:
        if i == 2:
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGINT)

    assert process.write(Folder(tmp_path), 0, jobs(memory, [], signal_it)).file.chunks == CHUNKS


def test_its_death_is_told(memory: StagingMemory, tmp_path: Path) -> None:
    process = WriteProcess(memory)

    def kill_it(i: int) -> None:
        if i == 2:
            os.kill(process.pid, signal.SIGKILL)
            while process.alive:
                time.sleep(0.01)

    with pytest.raises(
        SaveFailed, match=r"died \(exit status -9\).*next checkpoint starts a new one"
    ):
        process.write(Folder(tmp_path), 0, jobs(memory, [], kill_it))
    with pytest.raises(SaveFailed, match="died"):
        process.write(Folder(tmp_path), 0, jobs(memory, []))
    process.close()


PARENT = """
import time
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.save.process import WriteProcess
process = WriteProcess(StagingMemory(1 << 20, shared=True))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", some_of([signal.SIGKILL, signal.SIGTERM], 0))
def test_it_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + 60  # imports alone may take 10 s on a busy machine
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


@pytest.mark.slow  # cli/test_shell.py::test_looking_needs_no_torch imports it as well
def test_it_needs_no_torchrec() -> None:
    source = (
        "import sys, torchrec_checknrun.save.process; "
        "assert not {'torchrec', 'fbgemm_gpu', 'hydra'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
