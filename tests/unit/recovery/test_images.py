"""Go on from images after a process has died: one rank, in this process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, make_job, restored, train
from tests.unit.run.lives import Lives, a_shard, by_images, differences, image_of, undisturbed
from torchrec_checknrun import Checkpointer, Consecutive, Images
from torchrec_checknrun.marks import intervals
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.tracking import Consumer

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


def modified(saver: Checkpointer) -> dict[str, list[int]]:
    """Return the rows since the last checkpoint."""
    rows = saver._target.tracked.modified_rows(Consumer.LAST)
    return {table: ids.tolist() for table, ids in rows.items()}


def test_the_next_step_is_that_of_a_run_without_a_failure(lives: Lives) -> None:
    job, saver = lives.begin(every_steps=3, when_busy="wait")
    assert saver.restore() is None
    train(job, saver, 7)
    job.train()  # the step that is torn: its rows are updated, its end never comes
    lives.die()
    job, saver = lives.begin(every_steps=3)
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step, saver.steps, job.steps) == ("images", 7, 7, 7)
    assert report.id.startswith("seq-000002")
    assert differences(job, undisturbed(7)) == []
    train(job, saver, 2)
    assert differences(job, undisturbed(9)) == []
    assert saver.wait() is not None
    saver.close()
    assert restored(lives.root, undisturbed(9)) == []
    assert lives.files() == []


def test_before_any_checkpoint(lives: Lives) -> None:
    job, saver = lives.begin()
    assert saver.restore() is None
    train(job, saver, 2)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.id, report.step, report.chain) == ("images", "", 2, ())
    train(job, saver)
    assert differences(job, undisturbed(3)) == []
    assert saver.save().kind == "full"


def test_random_numbers_go_on(lives: Lives) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), np.random.random(), random.random()]

    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    wanted = draw()
    lives.die()
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    _, saver = lives.begin()
    assert by_images(saver.restore())
    assert draw() == wanted


def test_right_after_a_start(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    for _ in range(2):
        lives.die()
        job, saver = lives.begin()
        assert by_images(saver.restore())
        assert differences(job, undisturbed(2)) == []
        job.train()


def test_a_fresh_start_is_for_the_program_until_a_step_is_done(lives: Lives) -> None:
    for life in range(3):
        job, saver = lives.begin()
        assert (saver.restore() is None) == (life < 2)
        if life < 2:
            with torch.no_grad():  # as a program does that starts from pretrained layers
                job.model.module.hidden.bias.fill_(3.0)
        if life == 1:
            train(job, saver)
            wanted = gather(job)
        lives.die()
    assert differences(job, wanted) == []


def test_a_loop_that_only_saves_goes_back_to_its_checkpoint(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    job.train(3)
    saver.save()
    wanted = gather(job)
    job.train(2)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert differences(job, wanted) == []


@pytest.mark.parametrize("what", ["rows", "dense"])
def test_a_save_in_the_middle_of_a_step_is_newer_than_the_image(lives: Lives, what: str) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    if what == "rows":
        job.train()
    else:
        with torch.no_grad():
            job.model.module.hidden.bias.fill_(3.0)
    saver.save()
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert differences(job, wanted) == []
    train(job, saver)
    saver.save()  # at a step's end
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []


def test_without_a_restore_images_begin_at_the_first_step(lives: Lives) -> None:
    job, saver = lives.begin()
    train(job, saver, 2)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(2)) == []


def test_the_next_checkpoint_is_differential_and_exact(lives: Lives) -> None:
    job, saver = lives.begin(every_steps=2)
    saver.restore()
    train(job, saver, 5)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    train(job, saver)
    report = saver.save()
    assert report.kind == "differential"
    assert restored(lives.root, undisturbed(6)) == []


def test_rates_that_were_set_come_back(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    wanted = make_job(seed=0)
    for each in (job, wanted):
        for group in each.optimizer.param_groups:
            group["lr"] = 0.013
    train(job, saver, 3)
    wanted.train(5)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    train(job, saver, 2)
    assert differences(job, gather(wanted)) == []


def test_a_named_checkpoint_is_restored_from_storage(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    id = saver.save().id
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    report = saver.restore(id)
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert differences(job, undisturbed(2)) == []
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(3)) == []


def test_a_later_restore_goes_back_to_the_checkpoint(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver, 2)
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert differences(job, undisturbed(2)) == []
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(3)) == []


def test_resume_never_starts_fresh(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    lives.die()
    job, saver = lives.begin(resume="never")
    start = gather(job)
    assert saver.restore() is None
    assert differences(job, start) == []
    assert saver.steps == 0


def test_an_image_that_the_storage_has_left_behind(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    lives.die()
    job, saver = lives.begin(survive=None)
    saver.restore()
    train(job, saver, 3)
    newest = saver.save().id
    saver.close()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 5)
    assert f"{newest} is the newest, from which it does not descend" in report.without_images[0]
    assert differences(job, undisturbed(5)) == []


def test_a_step_ends_once_no_gradient_waits(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    job.optimizer.zero_grad()
    job.loss(*job.batch(2)).backward()  # tables change at once, dense parameters later
    saver.step()
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("images", 2)
    assert differences(job, undisturbed(2)) == []


def test_rows_written_by_hand_inside_writing_are_undone(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    table, shard = a_shard(saver)
    with torch.no_grad(), saver.writing(table, [0, 1]):
        shard[:2] = 5.0
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(2)) == []
    train(job, saver)
    saver.save()
    assert restored(lives.root, undisturbed(3)) == []


def test_rows_written_by_hand_unannounced_are_out_of_reach_until_the_step_s_end(
    lives: Lives,
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver)
    _, shard = a_shard(saver)
    with torch.no_grad():
        shard[:2] = 5.0
    saver._saver._look(saver.steps)  # notices it, as the next save does
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert "can go back to steps []" in report.without_images[0]
    _, shard = a_shard(saver)
    with torch.no_grad():
        shard[:2] = 5.0
    train(job, saver)
    wanted = gather(job)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []


def test_rows_marked_after_they_were_written(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    table, _ = a_shard(saver)
    saver.mark(table, [0])
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert report.without_images


def test_an_exception_leaves_the_image_and_a_close_does_not(lives: Lives) -> None:
    job, saver = lives.begin()

    def loop() -> None:
        with saver:
            saver.restore()
            train(job, saver, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert len(lives.files()) == 1
    job, saver = lives.begin()
    with saver:
        assert by_images(saver.restore())
        train(job, saver)
    assert lives.files() == []


def test_a_rank_with_data_parallel_tables_alone(lives: Lives) -> None:
    tables = (TableSpec("t0", 40, 8, ("f0", "f1")),)
    spec = ModelSpec((CollectionSpec("a", tables),), dense="adam")
    jobs = [Job.build(spec, {"a.t0": "data_parallel"}, seed=seed) for seed in (0, 1, 0)]
    for job in jobs[:2]:
        files._mapped.clear()
        survive = Images(folder=str(lives.memory))
        saver = checkpointer(lives.root, job, survive=survive)
        assert by_images(saver.restore()) == (job is jobs[1])
        train(job, saver, 2)
        job.train()
        saver._release(failed=True)
    jobs[2].train(5)
    assert differences(jobs[1], gather(jobs[2])) == []


def test_a_program_that_trains_on_after_an_error_leaves_the_image_as_it_was(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    wanted = make_job(seed=0)
    wanted.train(5)
    lives.die()
    job.train(3)  # without a Checkpointer, in the same memory
    assert differences(job, gather(wanted)) == []
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(2)) == []


def test_a_program_that_tries_again_after_an_error_goes_on(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    job.train()
    saver._release(failed=True)
    survive = Images(folder=str(lives.memory))
    with checkpointer(lives.root, job, survive=survive) as saver:  # in the same model
        assert by_images(saver.restore())
        assert differences(job, undisturbed(2)) == []
        train(job, saver, 2)
        assert differences(job, undisturbed(4)) == []


def test_numbers_of_intervals_are_given_out_again(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save more checkpoints than a byte counts; a life that follows marks what the last one did."""
    monkeypatch.setattr(intervals, "_MOST", 4)
    job, saver = lives.begin(policy=Consecutive())
    saver.restore()
    for _ in range(7):
        train(job, saver)
        saved = saver.save()
        descent = image_of(saver)._descent
        assert (descent.known.head, descent.known.attempts) == (saved.id, ())
        assert descent.clock.interval <= 4
        assert max(int(kept.rows.max()) for kept in descent.kept) <= 4
    train(job, saver)
    wanted = modified(saver)
    lives.die()
    job, saver = lives.begin(policy=Consecutive())
    report = saver.restore()
    assert by_images(report)
    assert report is not None
    assert report.id == saved.id
    assert modified(saver) == wanted
    train(job, saver)
    assert saver.save().kind == "differential"
    saver.close()
    assert restored(lives.root, undisturbed(9)) == []
