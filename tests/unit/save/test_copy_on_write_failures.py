"""Whatever fails while rows are copied on write: training goes on, the save is told, rows stay.

Rows are held before they are copied, and overflow memory is too small for one step, so that
training waits in a hook while something else goes wrong.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.hanging import HangingStore
from tests.distributed.models import CollectionSpec, Job, ModelSpec, uniform_plan
from tests.distributed.on_write import (
    TABLES,
    Held,
    build,
    checkpointer,
    differences,
    held_copiers,
    hook_waits,
    little_memory,
    soon,
    was_on_write,
)
from tests.distributed.states import gather
from tests.unit.save.test_broken_saves import refuse_threads
from torchrec_checknrun import Images, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.run.waiting import await_save
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.snapshot.staging import COPIER

pytestmark = pytest.mark.usefixtures("one_rank")
SLACK = 12.0
"""Seconds that a busy machine may take."""


class Begun:
    """A job in the middle of its second save, whose rows are held before they are copied.

    Attributes:
        wanted: the state at the cut.
    """

    def __init__(self, root: str | Path, held: Held, **options: Any) -> None:
        self.root = root
        self.held = held
        self.job = build()
        self.saver = checkpointer(root, self.job, **options)
        self.job.train()
        was_on_write(self.saver.save(), protected=False)
        self.job.train(3)
        self.wanted = gather(self.job)
        held.hold()
        self.saver.save(wait=False)

    @property
    def save(self) -> Save:
        assert self.saver._saver.running is not None
        return self.saver._saver.running

    def train_into_the_wait(self) -> float:
        """Train until a hook has waited and gone on; return the longest step's seconds."""
        self.held.wait()
        longest = 0.0
        for _ in range(4):
            started = time.monotonic()
            self.job.train()
            longest = max(longest, time.monotonic() - started)
        assert hook_waits(self.saver) or longest > 0.3
        assert longest > 0.3, "no hook has waited"
        return longest

    def next_save_is_whole(self, protected: bool = True) -> None:
        self.job.train()
        wanted = gather(self.job)
        self.held.hold()
        self.saver.save(wait=False)
        with soon(self.held.let_go, 0.2):
            self.job.train(2)
        was_on_write(self.saver.wait(), protected)
        self.saver.close()
        assert differences(self.root, wanted) == []


@contextmanager
def begun(root: str | Path, **options: Any) -> Iterator[Begun]:
    with ExitStack() as stack:
        stack.enter_context(little_memory())
        held = stack.enter_context(held_copiers())
        yield Begun(root, held, **{"timeout_seconds": 60.0, **options})


def test_a_hook_waits_until_the_background_goes_on(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        with soon(run.held.let_go):
            run.train_into_the_wait()
        report = was_on_write(run.saver.wait())
        assert report.memory_wait_seconds > 0.2
        run.saver.close()
        assert differences(tmp_path, run.wanted) == []


def test_given_up_while_a_hook_waits(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        with soon(lambda: run.save.give_up(SaveFailed("given up, says the test"))):
            run.train_into_the_wait()
        run.held.let_go()
        with pytest.raises(SaveFailed, match="says the test"):
            run.saver.wait()
        run.next_save_is_whole()


@pytest.mark.usefixtures("control_c")
def test_control_c_while_a_hook_waits(tmp_path: Path) -> None:
    """Interrupt training, not the save."""
    with begun(tmp_path) as run:
        with soon(_thread.interrupt_main), pytest.raises(KeyboardInterrupt):
            run.train_into_the_wait()
        run.held.let_go()
        was_on_write(run.saver.wait())
        assert differences(tmp_path, run.wanted) == []
        run.saver.close()  # DDP doesn't train on after an interrupted backward pass


@pytest.mark.parametrize(
    "error", [MemoryError("says the test"), KeyboardInterrupt("says the test")]
)
def test_the_copier_dies(tmp_path: Path, error: BaseException) -> None:
    with begun(tmp_path) as run:
        with soon(lambda: run.held.let_go(error)):
            run.train_into_the_wait()
        with pytest.raises((SaveFailed, KeyboardInterrupt), match="says the test"):
            run.saver.wait()
        run.next_save_is_whole()


def test_a_hook_waits_too_long(tmp_path: Path) -> None:
    with begun(tmp_path, timeout_seconds=2.0) as run:
        seconds = run.train_into_the_wait()
        assert 1.5 < seconds < 2 + SLACK
        run.held.let_go()
        with pytest.raises(SaveFailed, match=r"training waited 2 s for memory.*memory_budget"):
            run.saver.wait()
        run.next_save_is_whole()


@pytest.mark.parametrize("call", ["open", "write", "manifest"])
def test_a_store_that_hangs_while_a_hook_waits(call: str) -> None:
    HangingStore.released.clear()
    try:
        with begun(f"hanging://on-write-{call}", timeout_seconds=3.0) as run:
            HangingStore.hangs.add(call)
            run.held.let_go()
            started = time.monotonic()
            run.job.train(4)
            with pytest.raises(SaveFailed, match=r"nothing was heard|training waited"):
                run.saver.wait()
            assert time.monotonic() - started < 2 * 3.0 + SLACK
            HangingStore.hangs.clear()
            HangingStore.released.set()
            run.next_save_is_whole()
    finally:
        HangingStore.released.set()
        HangingStore.hangs.clear()
        HangingStore.store.clear()


def test_no_thread_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build()
    with monkeypatch.context() as patch:
        refuse_threads(patch, COPIER, 0)
        saver = checkpointer(tmp_path, job)
        job.train()
        with pytest.raises(SaveFailed, match="can't start new thread"):
            saver.save()
    job.train()
    wanted = gather(job)
    was_on_write(saver.save(), protected=False)
    saver.close()
    assert differences(tmp_path, wanted) == []


def test_a_thread_that_was_started_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the last checkpoint of an interpreter that ends, and starts no more threads."""
    job = build()
    saver = checkpointer(tmp_path, job)
    with monkeypatch.context() as patch:
        refuse_threads(patch, COPIER, 0)
        job.train()
        was_on_write(saver.save(), protected=False)
    saver.close()
    assert differences(tmp_path, gather(job)) == []


def test_closed_while_rows_are_copied(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        with soon(run.held.let_go):
            run.train_into_the_wait()
        run.held.hold(after=2)
        with soon(run.held.let_go):
            run.saver.close()
        assert differences(tmp_path, run.wanted) == []
        run.job.train()  # without hooks


def test_an_error_closes_it_while_rows_are_copied(tmp_path: Path) -> None:
    """Don't wait for the rows; training that goes on all the same doesn't either."""
    with begun(tmp_path) as run:
        started = time.monotonic()
        with pytest.raises(InterruptedError), run.saver:
            raise InterruptedError
        run.job.train(5)
        assert time.monotonic() - started < SLACK
        run.held.let_go()
        assert run.saver._saver._background._thread is not None
        run.saver._saver._background._thread.join(SLACK)
    other = build()
    with checkpointer(tmp_path, other) as saver:  # the first or the second
        report = saver.restore()
    assert report is not None


def test_the_process_is_killed_while_rows_are_copied(tmp_path: Path) -> None:
    with begun(tmp_path, background="process") as run:
        process = run.saver._saver._background._process
        assert process is not None
        pid = process.pid

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)
            run.held.let_go()

        with soon(kill):  # a death noticed before the hook waits leaves nothing to wait for
            run.train_into_the_wait()
        with pytest.raises(SaveFailed):
            run.saver.wait()
        run.next_save_is_whole()


def test_a_write_by_hand_before_rows_are_surveyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name the write, not what the survey of rows met."""
    from torchrec_checknrun.save import background

    job, go, reached = build(), threading.Event(), threading.Event()
    survey = background.survey

    def wait_and_survey(*args: Any) -> Any:
        reached.set()
        assert go.wait(60)
        return survey(*args)

    quantization = Quantization(method="importance", exact_below_rows=0)
    saver = checkpointer(tmp_path, job, quantization=quantization)
    job.train()
    monkeypatch.setattr(background, "survey", wait_and_survey)
    saver.save(wait=False)
    assert reached.wait(60)
    next(iter(job.model.state_dict().values())).local_shards()[0].tensor[:5] += 1
    job.train()
    saver.step()
    go.set()
    with pytest.raises(SaveFailed, match="were written outside of training"):
        saver.wait()
    reasons = saver.save().copied_at_cut.values()  # from now on
    assert set(reasons) == {"the program writes rows outside of training"}
    saver.close()


def written_while_copied(saver: Any, held: Held, train_and_clip: Callable[[], None]) -> None:
    """Begin a checkpoint, write its rows by hand before they are copied, and wait for its end."""
    held.hold()
    train_and_clip()
    assert saver.step() is None
    held.wait()
    train_and_clip()
    held.let_go()
    await_save(saver._saver.running)


def test_the_last_checkpoint_is_made_again(tmp_path: Path) -> None:
    """Save at the end what the last checkpoint was to hold before the program wrote it by hand."""
    job = build()
    saver = checkpointer(tmp_path, job, every_steps=1)
    weight = next(iter(job.model.state_dict().values())).local_shards()[0].tensor

    def train_and_clip() -> None:
        job.train()
        weight[:5].clamp_(-1, 1)

    with held_copiers() as held:
        written_while_copied(saver, held, train_and_clip)
    wanted = gather(job)
    saver.close()
    assert differences(tmp_path, wanted) == []


def test_tables_written_by_hand_in_each_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Train on with a warning, and copy all tables that are written by hand at later cuts."""
    spec = ModelSpec(tuple(CollectionSpec(name, TABLES[:1]) for name in "ab"))
    job = Job.build(spec, uniform_plan(spec, "row_wise", 1), seed=0, samples=64)
    saver = checkpointer(tmp_path, job, every_steps=1)
    weights = [
        weight.local_shards()[0].tensor
        for name, weight in job.model.state_dict().items()
        if "embedding_bags" in name
    ]

    def train_and_clip() -> None:
        job.train()
        for weight in weights:
            weight[:5].clamp_(-1, 1)

    with held_copiers() as held:
        written_while_copied(saver, held, train_and_clip)
        saver.step()  # raises nothing
        saver.wait()
    assert "were written outside of training" in caplog.text
    for _ in range(3):
        train_and_clip()
        saver.step()
        report = saver.wait()
        assert report is not None
        assert len(report.copied_at_cut) == 2
    saver.close()


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("survive", [None, Images()], ids=["heap", "images"])
def test_the_first_checkpoint_of_rows_written_in_each_step(
    tmp_path: Path, survive: Images | None, every: int
) -> None:
    """Copy them at the cut; not those that were written once, or before training."""
    job = build()
    saver = checkpointer(tmp_path, job, survive=survive)
    weight = next(iter(job.model.state_dict().values())).local_shards()[0].tensor
    weight.mul_(0.5)
    saver.restore()
    for step in range(1, 9):
        job.train()
        if step % every == 0:
            weight[:5].clamp_(-1, 1)
        saver.step()
    with held_copiers() as held:
        if every == 5:
            held.hold()
        saver.save(wait=False)
        wanted = gather(job)
        if every == 5:
            held.wait()
        else:
            weight[:5].clamp_(-0.001, 0.001)
        held.let_go()
        report = saver.wait()
    assert report is not None
    reasons = {"the program writes rows outside of training"}
    assert set(report.copied_at_cut.values()) == (reasons if every < 5 else set())
    assert differences(tmp_path, wanted) == []
    saver.close()


def test_more_saves_than_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give saves up as the generations of a shard's states run out: none of them comes again."""
    from torchrec_checknrun.snapshot import cut_rows

    monkeypatch.setattr(cut_rows, "GENERATIONS", 3)
    job = build()
    saver = checkpointer(tmp_path, job, timeout_seconds=60.0)
    with held_copiers() as held:
        for number in range(9):
            job.train(2)
            held.hold(after=1)
            saver.save(wait=False)
            job.train(2)
            held.wait()
            if number % 3 == 2:
                running = saver._saver.running
                assert running is not None
                running.give_up(SaveFailed("says the test"))
                job.train()
                held.let_go()
                with pytest.raises(SaveFailed, match="says the test"):
                    saver.wait()
            else:
                held.let_go()
                was_on_write(saver.wait())
    memory = saver._saver._background.memory.on_write
    assert memory is not None
    assert {0, 1, 2, 3} >= {states.generation for states in memory._states.values()}
    wanted = gather(job)
    saver.save()
    saver.close()
    assert differences(tmp_path, wanted) == []


def test_no_memory_for_new_generations_behind_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the next cut make them, and copy each row of every cut."""
    from torchrec_checknrun.snapshot import cut_rows

    renew, failed = cut_rows._RowStates.renew, []

    def refuse_behind(states: cut_rows._RowStates) -> None:
        last = states.generation == cut_rows.GENERATIONS
        if last and threading.current_thread() is not threading.main_thread():
            failed.append(states)
            raise RuntimeError("can't allocate memory, says the test")
        renew(states)

    monkeypatch.setattr(cut_rows, "GENERATIONS", 3)
    monkeypatch.setattr(cut_rows._RowStates, "renew", refuse_behind)
    job = build()
    with checkpointer(tmp_path, job, timeout_seconds=5.0) as saver:
        for _ in range(8):
            job.train(2)
            was_on_write(saver.save(), protected=False)
        wanted = gather(job)
    assert failed
    assert differences(tmp_path, wanted) == []
