"""Tables stored as differences when a process dies, a save is given up, or training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some_of
from tests.unit.run.deltas import delta, expected, lc, live, make_job, restored, same, saving, train
from tests.unit.run.lives import Lives, by_images
from torchrec_checknrun import EverySteps, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save import background

pytestmark = pytest.mark.usefixtures("one_rank")


def test_after_images_the_next_checkpoint_is_a_base(lives: Lives) -> None:
    """Keep the rows of the last checkpoint out of the image."""
    job, saver = lives.begin(quantization=delta())
    saver.restore()
    kinds = []
    for _ in range(3):
        train(job, saver)
        kinds.append(saver.save().kind)
    train(job, saver, 2)
    lives.die()
    job, saver = lives.begin(quantization=delta())
    assert by_images(saver.restore())
    train(job, saver)
    kinds.append(saver.save().kind)
    train(job, saver)
    kinds.append(saver.save().kind)
    assert kinds == ["full", "differential", "differential", "full", "differential"]
    wanted = expected(saver)
    lives.die()
    for path in lives.memory.iterdir():
        path.unlink()
    job, saver = lives.begin(quantization=delta())
    assert not by_images(saver.restore())
    assert same(live(saver), wanted) == []


@pytest.mark.parametrize(
    "quantization",
    [delta(step=2.0**-16), delta(optimizer="logdelta"), lc()],
    ids=["delta", "logdelta", "lc"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_given_up_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, quantization: Quantization
) -> None:
    """Give a save up while its thread hangs, before or after it has encoded rows."""
    job = make_job()
    write = background.write_rank_file
    reached, go_on = threading.Event(), threading.Event()

    def hanging(*arguments: Any) -> Any:
        summary = write(*arguments) if when == "after" else None
        reached.set()
        assert go_on.wait(60)
        return summary if summary is not None else write(*arguments)

    with saving(tmp_path, job, quantization=quantization) as saver:
        for _ in range(2):
            train(job, saver, 3)
            saver.save()
        wanted = expected(saver)
        train(job, saver)
        with monkeypatch.context() as patch:
            patch.setattr(background, "write_rank_file", hanging)
            saver.save(wait=False)
            assert reached.wait(60)
            running = saver._saver.running
            assert running is not None
            assert running.give_up(SaveFailed("says the test"))
            with pytest.raises(SaveFailed):
                saver.wait()
            go_on.set()
            assert running.thread is not None
            running.thread.join(60)
        assert same(restored(tmp_path), wanted) == []
        train(job, saver)
        assert saver.save().kind == "differential"
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []


@pytest.mark.parametrize("staging", some_of(["copy_on_write", "auto", "copy", "encode"], 0, 3))
def test_training_never_changes_what_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: Any
) -> None:
    """Train on while rows are copied and encoded: a link holds the rows of its instant."""
    job, write = make_job(), background.write_rank_file
    states: list[tuple[str, Any]] = []

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(background, "write_rank_file", slow)
    with saving(tmp_path, job, staging=staging, memory_budget=1 << 20) as saver:
        for _ in range(6):
            go_on = threading.Event()
            train(job, saver)
            at_cut = live(saver)
            saver.save(wait=False)
            job.train()
            go_on.set()
            report = saver.wait()
            assert report is not None
            states.append((report.id, at_cut))
    for name, at_cut in states:
        found = restored(tmp_path, name)
        for key, value in at_cut.items():
            if "/" in key:  # states are exact
                assert found[key].tobytes() == value.tobytes(), (name, key)
            else:
                assert abs(found[key] - value).max() < 2.0**-4


def test_skipped_checkpoints_change_nothing(tmp_path: Path) -> None:
    """A checkpoint is due while one is written: it is skipped, and its rows are in the next."""
    job = make_job()
    with saving(tmp_path, job, triggers=[EverySteps(1)]) as saver:
        train(job, saver, 12)
        saver.wait()
        train(job, saver)
        saver.wait()
        saver.save()
        wanted = expected(saver)
    assert same(restored(tmp_path), wanted) == []
