"""Keep what is written to tables built within ``skip_initialization``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.models import Job, uniform_plan
from tests.unit.recovery.test_skipped_initialization import SPEC, tables_of
from tests.unit.run.lives import Lives
from torchrec_checknrun import Images, skip_initialization
from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]


@pytest.fixture
def run(lives: Lives) -> Lives:
    def make(seed: int) -> Job:
        with skip_initialization(lives.root, Images(folder=str(lives.memory))):
            return Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), seed)

    lives.make = make
    _, saver = lives.begin()
    assert saver.restore() is None
    lives.die()  # before the first step: the next start is a fresh one beside an image
    return lives


def shard_of(job: Job, table: str) -> torch.Tensor:
    for name, value in job.model.state_dict().items():
        if name.split(".")[-2] == table:
            shard: torch.Tensor = value.local_shards()[0].tensor
            return shard
    raise AssertionError(table)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_tables_that_were_written_are_kept(run: Lives, resume: str) -> None:
    job, saver = run.begin(resume=resume)
    shard_of(job, "t0").fill_(0.25)
    shard_of(job, "t2").fill_(0.5)
    assert saver.restore() is None
    tables = tables_of(job)
    assert (tables["t0"] == 0.25).all()
    assert (tables["t2"] == 0.5).all()
    assert np.isfinite(tables["t1"]).all()
    assert (np.abs(tables["t1"]) > 0).mean() > 0.9, "it was drawn"


def test_state_dicts_that_were_loaded_are_kept(run: Lives) -> None:
    pretrained = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), 77)
    wanted = tables_of(pretrained)
    job, saver = run.begin()
    job.model.load_state_dict(pretrained.model.state_dict())
    assert saver.restore() is None
    for name, rows in tables_of(job).items():
        np.testing.assert_array_equal(rows, wanted[name])


@pytest.mark.parametrize("rows", [slice(0, 1), slice(5, 9), slice(39, 40)])
def test_a_part_that_was_written_is_not_lost_unnoticed(run: Lives, rows: slice) -> None:
    job, saver = run.begin()
    shard_of(job, "t0")[rows] = 0.25
    with pytest.raises(ModelPartlyRestored, match=r"c\.embedding_bags\.t0.*after restore"):
        saver.restore()
    with pytest.raises(ModelPartlyRestored):
        saver.step()


def test_a_checkpoint_replaces_a_part_that_was_written(run: Lives) -> None:
    job, saver = run.begin()
    assert saver.restore() is None
    report = saver.save()
    wanted = tables_of(job)
    run.die()
    for path in run.memory.glob("*.image"):
        path.write_bytes(b"no image")
    job, saver = run.begin()
    shard_of(job, "t0")[:1] = 0.25
    restored = saver.restore()
    assert restored is not None
    assert restored.id == report.id
    for name, rows in tables_of(job).items():
        np.testing.assert_array_equal(rows, wanted[name])


def test_no_row_is_looked_up_before_it_has_a_value(run: Lives) -> None:
    """Also not in a model that no Checkpointer knows, such as a second one."""
    job, saver = run.begin()
    with pytest.raises(ModelPartlyRestored, match="skip_initialization"):
        job.train(1)
    other = run.make(9)
    saver.restore()
    job.train(1)
    with pytest.raises(ModelPartlyRestored, match="skip_initialization"):
        other.train(1)
    for name in ("t0", "t1", "t2"):
        shard_of(other, name).fill_(0.5)
    other.train(1)
