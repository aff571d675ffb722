"""Threads that predict while versions are applied get answers of exactly one version each."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.save_sweep import alone
from tests.unit.chains import one_thread
from tests.unit.serve.served import Job, Net, batch, quantized, restored
from torchrec_checknrun import Follower, Quantization
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.serve.copies import OneCopy, TwoCopies
from torchrec_checknrun.serve.load import Load

pytestmark = pytest.mark.usefixtures("one_rank")
ROWS = 2000
VERSIONS = 3
THREADS = 2
_QUESTIONS = [batch(seed, 20, ROWS) for seed in range(4)]


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, list[torch.Tensor]]]:
    """Save versions that differ in 26 % of the rows, and find out what each answers."""
    root = tmp_path_factory.mktemp("published") / "all"
    with alone():
        return root, _answers(root)


def _answers(root: Path) -> dict[str, list[torch.Tensor]]:
    job = Job(
        root, rows=ROWS, quantization=Quantization(bits=4, exact_below_rows=0), chunk_bytes=20_000
    )
    answers: dict[str, list[torch.Tensor]] = {}
    for seed in range(VERSIONS):
        job.train(100 + seed, samples=150)  # 300 of 2000 draws each: 26 % with both features
        job.train(200 + seed, samples=150)
        job.save()
        (newest,) = {path.name for path in root.glob("seq-*")} - answers.keys()
        wanted = quantized(restored(root, rows=ROWS), 4)
        with torch.no_grad():
            answers[newest] = [wanted(question) for question in _QUESTIONS]
    job.saver.close()
    return answers


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause after every block of rows, so that predictions fall between blocks."""
    put = Load._put

    def slowly(*args: Any) -> None:
        put(*args)
        time.sleep(0.002)

    monkeypatch.setattr(Load, "_put", slowly)


def publish(source: Path, target: Path) -> Iterator[None]:
    """Copy one checkpoint after the other, each with its manifest last."""
    for path in sorted(source.glob("seq-*")):
        shutil.copytree(path, target / path.name, ignore=lambda *_: [MANIFEST_NAME])
        shutil.copy(path / MANIFEST_NAME, target / path.name)
        yield


def wrong_answers(
    follower: Follower, answers: dict[str, list[torch.Tensor]], advance: Callable[[], None]
) -> tuple[list[str], int]:
    """Predict in two threads while versions are applied; return what was wrong, and how many
    answers there were.
    """
    wrong: list[str] = []
    counts = [0] * THREADS
    ends = threading.Event()

    def predict(number: int) -> None:
        last = -1
        question = _QUESTIONS[number]
        while not ends.is_set():
            with follower.read() as (model, version), torch.no_grad():
                answer = model(question)
            if version is None:
                continue
            if not torch.equal(answer, answers[version.checkpoint_id][number]):
                wrong.append(f"not an answer of {version.checkpoint_id}")
            if version.sequence < last:
                wrong.append(f"{version.sequence} after {last}")
            last = version.sequence
            counts[number] += 1

    threads = [threading.Thread(target=predict, args=(number,)) for number in range(THREADS)]
    with one_thread():
        for thread in threads:
            thread.start()
        try:
            advance()
        finally:
            ends.set()
            for thread in threads:
                thread.join()
    return wrong, sum(counts)


def run(root: Path, tmp_path: Path, answers: dict[str, list[torch.Tensor]], copies: int) -> Any:
    target = tmp_path / "published"
    target.mkdir()
    follower = Follower(target, quantized(Net(rows=ROWS), 4), copies=copies)
    served = []

    def advance() -> None:
        for _ in publish(root, target):
            version = follower.poll()
            assert version is not None
            assert version.error is None
            served.append(version.checkpoint_id)

    wrong = wrong_answers(follower, answers, advance)
    assert served == list(answers)
    return wrong


@pytest.mark.parametrize("copies", [1, 2])
def test_each_answer_is_of_one_version(
    published: Any, tmp_path: Path, slow: None, copies: int
) -> None:
    root, answers = published
    for number in range(4):
        every = [of_version[number] for of_version in answers.values()]
        assert all(bool(answer.isfinite().all()) for answer in every)
        assert not any(torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])
    wrong, count = run(root, tmp_path, answers, copies)
    assert wrong == []
    assert count > 0


def into_the_served_copy(self: TwoCopies, *_: object) -> Any:
    return self._served


def without_waiting(self: TwoCopies, closing: object, seconds: float, rest: Any) -> Any:
    self._idle.catch_up(self._served, rest)
    time.sleep(0.01)
    return self._idle


def show_at_once(self: OneCopy, version: Any, *_: object) -> None:
    assert self._staged is not None
    self._staged.apply()
    self.version = version


def slow_apply(put: Callable[..., None]) -> Callable[..., None]:
    def slowly(*args: Any) -> None:
        put(*args)
        time.sleep(0.0005)

    return slowly


def test_rows_written_where_they_are_read_are_noticed(
    published: Any, tmp_path: Path, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoCopies, "begin", into_the_served_copy)
    wrong, _ = run(published[0], tmp_path, published[1], 2)
    assert wrong


def test_one_copy_without_a_pause_is_noticed(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrec_checknrun.serve.inference.tables import ServedTable

    monkeypatch.setattr(ServedTable, "put", slow_apply(ServedTable.put))
    monkeypatch.setattr(OneCopy, "show", show_at_once)
    wrong, _ = run(published[0], tmp_path, published[1], 1)
    assert wrong


def test_who_is_inside_is_waited_for(published: Any, tmp_path: Path) -> None:
    """A prediction that takes long holds back the second version after its own, not the first."""
    root, answers = published
    target = tmp_path / "published"
    target.mkdir()
    follower = Follower(target, quantized(Net(rows=ROWS), 4), timeout_seconds=1.0)
    steps = publish(root, target)
    next(steps)
    follower.poll()
    with follower.read() as (model, version), torch.no_grad():
        assert version is not None
        next(steps)
        first = follower.poll()
        next(steps)
        second = follower.poll()
        assert first is not None
        assert second is not None
        assert first.sequence == second.sequence > version.sequence
        assert second.error is not None
        assert "has not ended" in second.error
        assert second.lag_steps > 0
        assert torch.equal(model(_QUESTIONS[0]), answers[version.checkpoint_id][0])
    third = follower.poll()
    assert third is not None
    assert third.error is None
    with follower.read() as (model, version), torch.no_grad():
        assert version is not None
        assert version.checkpoint_id == third.checkpoint_id
        assert torch.equal(model(_QUESTIONS[0]), answers[version.checkpoint_id][0])


def test_one_copy_waits_for_who_is_inside(published: Any, tmp_path: Path) -> None:
    root, answers = published
    target = tmp_path / "published"
    target.mkdir()
    follower = Follower(target, quantized(Net(rows=ROWS), 4), copies=1, timeout_seconds=1.0)
    steps = publish(root, target)
    next(steps)
    follower.poll()
    next(steps)
    with follower.read() as (model, version), torch.no_grad():
        assert version is not None
        held_back = follower.poll()
        assert held_back is not None
        assert held_back.checkpoint_id == version.checkpoint_id
        assert "has not ended" in str(held_back.error)
        with follower.read() as (_, inner):  # would wait for itself otherwise
            assert inner == version
        assert torch.equal(model(_QUESTIONS[0]), answers[version.checkpoint_id][0])
    after = follower.poll()
    assert after is not None
    assert after.sequence > version.sequence
    with follower.read() as (model, _), torch.no_grad():
        assert torch.equal(model(_QUESTIONS[0]), answers[after.checkpoint_id][0])


@pytest.mark.parametrize("copies", [1, 2])
def test_short_predictions_take_no_time_from_the_wait_for_a_long_one(
    published: Any, tmp_path: Path, copies: int
) -> None:
    root, _ = published
    target = tmp_path / "published"
    target.mkdir()
    follower = Follower(target, quantized(Net(rows=ROWS), 4), copies=copies)
    steps = publish(root, target)
    next(steps)
    follower.poll()
    inside = threading.Event()

    def predict() -> None:
        end = time.monotonic() + 3
        with follower.read():
            inside.set()
            while time.monotonic() < end:
                with follower.read():
                    time.sleep(0.001)

    thread = threading.Thread(target=predict)
    thread.start()
    assert inside.wait(60)
    for _ in range(copies):
        next(steps)
        version = follower.poll()
        assert version is not None
        assert version.error is None
    thread.join()
    assert version is not None
    assert version.checkpoint_id == max(path.name for path in target.glob("seq-*"))
