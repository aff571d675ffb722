"""Run jobs whose rows are copied on write, with little memory and a copier that is held back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec, uniform_plan
from tests.distributed.states import State, gather, scramble
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive
from torchrec_checknrun.marks.row_copies import PAGE_BYTES, ShardCopies
from torchrec_checknrun.save import save_memory
from torchrec_checknrun.snapshot.cut_rows import CopyOnWriteMemory

TABLES = (TableSpec("t0", 3000, 16, ("f0", "f1")), TableSpec("t1", 2000, 12, ("f1",)))
SPEC = ModelSpec((CollectionSpec("c", TABLES),))
CHUNK_BYTES = 20_000
PATIENCE = 60.0
"""Seconds until a test that hangs says so."""


def where(tmp_path: Path, ranks: int = 2) -> dict[str, Any]:
    return {"root": str(tmp_path / "root"), "plan": uniform_plan(SPEC, "row_wise", ranks)}


def build(plan: Plan | None = None, seed: int = 0) -> Job:
    """Make a job whose step touches some hundred rows."""
    return Job.build(SPEC, plan or uniform_plan(SPEC, "row_wise", 1), seed=seed, samples=64)


def checkpointer(root: str | Path, job: Job, **options: Any) -> Checkpointer:
    options = {"policy": Consecutive(), "retention": None, "chunk_bytes": CHUNK_BYTES, **options}
    state = {"optimizer": job.optimizer, "job": job}
    return Checkpointer(root, model=job.model, state=state, **options)


@contextmanager
def little_memory(pages: int = 1) -> Iterator[None]:
    """Give checkpointers that are made here so little memory that a step's rows overflow it, and
    staging memory for some chunks only.
    """

    def make(size: int, *arguments: Any) -> CopyOnWriteMemory:
        return CopyOnWriteMemory(min(size, pages * PAGE_BYTES), *arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(save_memory, "CopyOnWriteMemory", make))
        stack.enter_context(mock.patch.object(save_memory, "_SPARE_BYTES", 1000))
        yield


class Held:
    """The copiers of this process, which ``hold`` holds before they claim further rows."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._left: int | None = None

    def hold(self, after: int = 0) -> None:
        """Hold the next chunk but some."""
        self._reached, self._go = threading.Event(), threading.Event()
        self._error, self._left = None, after

    def let_go(self, error: BaseException | None = None) -> None:
        """Let the copier go on, or raise an error in its place."""
        self._error, self._left = error, None
        self._go.set()

    def wait(self) -> None:
        """Wait until a chunk is held."""
        assert self._reached.wait(PATIENCE), "no chunk is copied"

    def pass_(self) -> None:
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            self._reached.set()
            assert self._go.wait(PATIENCE), "held for good"
            if self._error is not None:
                raise self._error


@contextmanager
def held_copiers() -> Iterator[Held]:
    """Let the block hold the background before a chunk."""
    stage, held = ShardCopies.stage, Held()

    def wait_and_stage(copies: ShardCopies, *arguments: Any) -> None:
        held.pass_()
        stage(copies, *arguments)

    with mock.patch.object(ShardCopies, "stage", wait_and_stage):
        try:
            yield held
        finally:
            held.let_go()


@contextmanager
def soon(act: Callable[[], object], seconds: float = 0.4) -> Iterator[None]:
    """Do something while the block waits."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.join(PATIENCE)
    assert not timer.is_alive(), "it hangs"


def hook_waits(saver: Checkpointer) -> bool:
    """Tell whether a hook finds no overflow memory now."""
    on_write = saver._saver._background.memory.on_write
    assert on_write is not None
    return bool(on_write.overflow.native.free() == 0)


def was_on_write(report: CheckpointReport | None, protected: bool = True) -> CheckpointReport:
    """Assert that all tables were copied on write, and rows before they were overwritten."""
    assert report is not None
    assert report.copied_at_cut == {}
    assert not protected or report.protected_rows > 0
    return report


def differences(root: str | Path, wanted: State, plan: Plan | None = None) -> list[str]:
    """Restore the newest checkpoint as another process would; return how it differs."""
    other = build(plan, seed=7)
    with checkpointer(root, other) as saver:
        scramble(other)
        assert saver.restore() is not None
    return references.differences(gather(other), wanted, None)
