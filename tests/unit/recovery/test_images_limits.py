"""Say why images can't be used, and end them where they can't be kept."""

from __future__ import annotations

import errno
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.memory.pieces import joined
from tests.unit.run.jobs import checkpointer, make_job, train
from tests.unit.run.lives import Lives, by_images, differences, image_of, undisturbed
from torchrec_checknrun import Checkpointer, HostCopies, Images, native
from torchrec_checknrun.errors import (
    CheckpointNotFound,
    ImagesRefused,
    ModelPartlyRestored,
    StorageFailed,
)
from torchrec_checknrun.memory import shard_memory
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.shard_memory import ShardMemory
from torchrec_checknrun.memory.step_journal import _CALM, StepJournal
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.shared_memory.header import HEAD_BYTES
from torchrec_checknrun.store.folder import Folder

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


@pytest.mark.parametrize(
    ("area", "reason"),
    [("state-0", "can go back to steps"), ("journal-0", "a segment names no shard")],
)
def test_damage_is_found_and_told(lives: Lives, area: str, reason: str) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    train(job, saver, 2)
    job.train()
    areas = image_of(saver)._areas
    assert areas is not None
    memory = [areas.get(area), areas.get(area.replace("0", "1"))]
    for each in memory:
        each[HEAD_BYTES if "state" in area else 0] ^= 0x7F
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert reason in report.without_images[0]
    assert differences(job, undisturbed(2)) == []
    train(job, saver)
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, undisturbed(3)) == []


def from_the_checkpoint(lives: Lives) -> tuple[Job, Checkpointer]:
    """Die, and begin anew: from the checkpoint of step 4."""
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 4)
    return job, saver


@pytest.mark.parametrize("after", [True, False], ids=["after the update", "before the lookup"])
def test_a_program_that_writes_rows_by_hand_in_each_step(
    lives: Lives, caplog: pytest.LogCaptureFixture, after: bool
) -> None:
    """Go back to a checkpoint where a write may have come that nobody has noticed yet."""
    job, saver = lives.begin()
    saver.restore()

    def write() -> None:
        next(iter(job.model.state_dict().values())).local_shards()[0].tensor[:5] *= 0.9

    def step(written: bool = True) -> None:
        for act in (job.train, write) if after else (write, job.train):
            if written or act is not write:
                act()
        saver.step()

    step()
    step(written=False)
    assert "in each step" not in caplog.text
    step()
    step()
    assert ("between a step's first update" in caplog.text) == after
    assert ("killed at any time" in caplog.text) != after
    saver.save()
    wanted = gather(job)
    step()
    if after:
        job.train()
    write()
    job, saver = from_the_checkpoint(lives)
    assert differences(job, wanted) == []
    if after:  # known from the process before
        job.train()
    write()
    job, saver = from_the_checkpoint(lives)
    for _ in range(_CALM + 1):
        step(written=False)
    job.train()
    lives.die()
    assert by_images(lives.begin()[1].restore())


def test_half_way_without_a_checkpoint_is_no_fresh_start(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    lives.die()
    job, saver = lives.begin()

    def fail(*_: object) -> None:
        raise ValueError("says the test")

    monkeypatch.setattr(RankImage, "go_back", fail)
    with pytest.raises(ModelPartlyRestored, match="no checkpoint"):
        saver.restore()
    with pytest.raises(ModelPartlyRestored):
        saver.step()


def test_images_of_other_shards_are_replaced(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    lives.die()
    with monkeypatch.context() as patch:
        patch.setattr(ShardMemory, "digest", "of another model")
        job, saver = lives.begin()
        report = saver.restore()
        assert report is not None
        assert "of other shards than the model has now" in report.without_images[0]
        train(job, saver)
        lives.die()
        job, saver = lives.begin()
        assert by_images(saver.restore())
        assert differences(job, undisturbed(3)) == []


def test_memory_that_is_replaced_ends_images_with_one_warning(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    with torch.no_grad():
        for shard in saver._target.tracked.shards:
            kernel: Any = shard.kernel_module
            kernel._emb_module.weights_host.data = kernel._emb_module.weights_host.data.clone()
    with caplog.at_level(logging.WARNING):
        train(job, saver, 3)
    assert [r.message for r in caplog.records if "memory was replaced" in r.message] != []
    assert sum("there is no image from this step on" in r.message for r in caplog.records) == 1
    lives.die()
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert (report.source, report.step) == ("checkpoint", 2)
    assert "not filled, or was being overwritten" in report.without_images[0]


def test_a_state_that_can_t_be_stored_ends_images(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver)
    monkeypatch.setattr(Job, "state_dict", lambda job: {"steps": object()})
    with caplog.at_level(logging.WARNING):
        train(job, saver, 2)
    assert sum("there is no image from this step on" in r.message for r in caplog.records) == 1


def test_a_state_that_grows(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing:
        def __init__(self) -> None:
            self.values: list[torch.Tensor] = []

        def state_dict(self) -> dict[str, Any]:
            return {"values": list(self.values)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    files._mapped.clear()
    grown = [Growing(), Growing()]
    for life, growing in enumerate(grown):
        files._mapped.clear()
        job = make_job(seed=life)
        saver = Checkpointer(
            lives.root,
            model=job.model,
            state={"optimizer": job.optimizer, "job": job, "growing": growing},
            survive=Images(folder=str(lives.memory)),
        )
        report = saver.restore()
        assert by_images(report) == (life == 1)
        if life == 0:
            for size in (10, 10_000, 300_000):
                growing.values.append(torch.full((size,), float(size)))
                train(job, saver)
        saver._release(failed=True)
    assert all(map(torch.equal, grown[0].values, grown[1].values))
    assert len(grown[1].values) == 3


def test_what_can_t_have_images_is_refused(tmp_path: Path) -> None:
    job = make_job()
    with pytest.raises(ImagesRefused, match="can't be used for images"):
        checkpointer(tmp_path / "a", job, survive=Images(folder=str(tmp_path / "missing")))
    with pytest.raises(ValueError, match=r"survive must be Images\(\), HostCopies\(\) or"):
        checkpointer(tmp_path / "b", job, survive=True)
    with (
        checkpointer(
            tmp_path / "c", job, survive=Images(folder=str(tmp_path), most_state_bytes=100)
        ) as saver,
        pytest.raises(ImagesRefused, match="more than most_state_bytes=100"),
    ):
        saver.restore()
    for wrong in ({"folder": "shm"}, {"most_state_bytes": 0}, {"keep_hours": -1}):
        with pytest.raises(ValueError, match="survive: "):
            Images(**wrong)
    for wrong in ({"folder": "shm"}, {"most_bytes": 0}, {"keep_hours": -1}):
        with pytest.raises(ValueError, match="survive: "):
            HostCopies(**wrong)


def test_without_a_kernel_the_reason_and_the_command_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tell a library that other sources have outlived from none."""
    tracked = TrackedModel(nn.Module())
    package = tmp_path / "torchrec_checknrun"
    (package / "csrc").mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(native, "__file__", str(package / "native.py"))
    monkeypatch.setattr(shard_memory, "has_extension", lambda: False)
    for reason in ("is missing", "was built of other sources than those beside it"):
        with pytest.raises(ImagesRefused, match=rf"kernel.* {reason}.*setup\.py build_ext"):
            ShardMemory(tracked)
        library = package / "_C.abi3.so"
        library.write_text(f"checknrun: built for torch {torch.__version__};")


def test_two_at_once_in_one_root_are_refused(lives: Lives, tmp_path: Path) -> None:
    _, first = lives.begin()
    first.restore()
    areas = image_of(first)._areas
    assert areas is not None
    areas.words.publish(1, files._process_word(1) or 1)  # as if process 1 had it
    with pytest.raises(ImagesRefused, match="process 1, which is alive"):
        lives.begin()


def test_the_model_is_asked_for_its_state_once(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver)  # the tables' memory has moved into the image
    asked: list[int] = []
    own = type(job.model).state_dict

    @functools.wraps(own)  # a user's own would be asked each time
    def ask(*arguments: Any, **named: Any) -> Any:
        asked.append(1)
        return own(*arguments, **named)

    monkeypatch.setattr(type(job.model), "state_dict", ask)
    train(job, saver, 3)
    assert not asked
    job.model.module.hidden.bias.data = job.model.module.hidden.bias.data.clone()
    train(job, saver, 2)
    assert len(asked) == 1
    wanted = gather(job)
    monkeypatch.undo()
    lives.die()
    job, saver = lives.begin()
    assert by_images(saver.restore())
    assert differences(job, wanted) == []


def test_taking_the_state_copies_nothing(lives: Lives) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver)
    taker = image_of(saver)._taker
    before = joined(taker.take())
    pieces = taker.take()
    with torch.no_grad():
        job.model.module.hidden.bias.add_(1)
    assert joined(pieces) != before


def test_a_failure_while_going_back_is_told(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    wanted = gather(job)
    train(job, saver)
    job.train()
    lives.die()

    def fail(*_: object) -> None:
        raise ValueError("says the test")

    monkeypatch.setattr(StepJournal, "undo_to", fail)
    job, saver = lives.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert "going back failed" in report.without_images[0]
    assert differences(job, wanted) == []


def test_a_failure_while_going_back_on_storage_that_fails(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse to go on with a model that is half of a step, until a restore succeeds."""
    job, saver = lives.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    wanted = gather(job)
    train(job, saver)
    job.train()
    lives.die()
    job, saver = lives.begin()
    with monkeypatch.context() as patch:

        def unlisted(folder: Folder) -> list[str]:
            raise StorageFailed(errno.EIO, "nothing can be listed, says the test")

        def fail(*_: object) -> None:
            patch.setattr(Folder, "names", unlisted)
            raise ValueError("says the test")

        patch.setattr(StepJournal, "undo_to", fail)
        with pytest.raises(ModelPartlyRestored, match="nothing can be listed"):
            saver.restore()
    for act in (saver.step, saver.save):
        with pytest.raises(ModelPartlyRestored, match="nothing can be listed"):
            act()
    report = saver.restore()
    assert report is not None
    assert differences(job, wanted) == []
    train(job, saver)
    with pytest.raises(CheckpointNotFound):  # which changes nothing any more
        saver.restore(f"{report.id[:-1]}x")
    train(job, saver)
