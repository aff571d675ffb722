"""A model whose tables are in an image is built without initial values, and never trained so."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import State, gather
from tests.examples import some_of
from tests.unit.run.jobs import train
from tests.unit.run.lives import Lives, by_images, differences
from torchrec_checknrun import Images, skip_initialization
from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.native import has_extension

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

SPEC = ModelSpec(
    (
        CollectionSpec("c", (TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 30, 8, ("f1",)))),
        CollectionSpec("s", (TableSpec("t2", 20, 8, ("f2",)),), bag=False),
    )
)
SHARDINGS = ("table_wise:0", "row_wise", "column_wise:0,0", "data_parallel")


class Plan:
    """A plan in which ``t1`` is sharded in one way, and the other tables by tables."""

    def __init__(self, sharding: str) -> None:
        self.sharding = sharding
        self._plan = {**uniform_plan(SPEC, "table_wise", 1), "c.t1": sharding}

    def build(self, seed: int = 0) -> Job:
        return Job.build(SPEC, self._plan, seed)

    def undisturbed(self, steps: int) -> State:
        job = self.build()
        job.train(steps)
        return gather(job)

    def empty_tables(self, job: Job) -> list[str]:
        """Return the tables that hold nothing but the zeros of fresh memory, and the mark of it."""
        tables = tables_of(job).items()
        return sorted(name for name, rows in tables if not np.any(np.nan_to_num(rows)))


def tables_of(job: Job) -> dict[str, np.ndarray]:
    """Return the tables' rows."""
    state = gather(job).items()
    return {n.split(".")[-2]: r for n, r in state if n.startswith("model/") and ".t" in n}


@pytest.fixture(params=some_of(SHARDINGS, 1, 3))
def plan(request: pytest.FixtureRequest) -> Plan:
    return Plan(request.param)


@pytest.fixture
def run(lives: Lives, plan: Plan) -> Lives:
    def make(seed: int) -> Job:
        images = Images(folder=str(lives.memory))
        with skip_initialization(lives.root, images) as skipped:
            job = plan.build(seed)
        assert skipped == bool(lives.files())
        shared = {"t1"} if plan.sharding == "data_parallel" else set()
        wanted = sorted({"t0", "t1", "t2"} - shared) if skipped else []
        assert plan.empty_tables(job) == wanted
        return job

    lives.make = make
    return lives


def test_rows_come_from_the_image(run: Lives, plan: Plan) -> None:
    job, saver = run.begin()
    assert saver.restore() is None
    train(job, saver, 3)
    run.die()
    job, saver = run.begin()
    assert by_images(saver.restore())
    assert differences(job, plan.undisturbed(3)) == []
    train(job, saver, 2)
    assert differences(job, plan.undisturbed(5)) == []
    saver.close()
    run.begin()  # without an image it is built as ever


def test_rows_come_from_a_checkpoint(run: Lives, plan: Plan) -> None:
    job, saver = run.begin()
    saver.restore()
    train(job, saver, 2)
    saver.save()
    saver.wait()
    run.die()
    for path in run.memory.glob("*.image"):
        path.write_bytes(b"no image")
    job, saver = run.begin()
    report = saver.restore()
    assert report is not None
    assert report.source == "checkpoint"
    assert differences(job, plan.undisturbed(2)) == []
    run.die()
    job, saver = run.begin()
    report = saver.restore(report.id)  # ignores images
    assert report is not None
    assert report.source == "checkpoint"
    assert differences(job, plan.undisturbed(2)) == []


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_fresh_start_has_initial_values(run: Lives, plan: Plan, resume: str) -> None:
    """Draw TorchRec's values: between plus and minus the root of a table's rows' inverse."""
    _, saver = run.begin()
    assert saver.restore() is None
    run.die()  # before the first step: the image is not gone back to
    job, saver = run.begin(resume=resume)
    assert saver.restore() is None
    assert plan.empty_tables(job) == []
    for rows in tables_of(job).values():
        bound = len(rows) ** -0.5
        assert np.abs(rows).max() <= bound
        assert np.abs(rows).mean() > bound / 4
        assert (np.abs(rows).max(axis=0) > bound / 4).all(), "each column was drawn"
    train(job, saver)
    assert saver.save().kind == "full"


def test_without_restore_nothing_is_trained(run: Lives, plan: Plan) -> None:
    job, saver = run.begin()
    saver.restore()
    train(job, saver, 1)
    run.die()
    job, saver = run.begin()
    with pytest.raises(ModelPartlyRestored, match="skip_initialization"):
        saver.step()
    with pytest.raises(ModelPartlyRestored, match="skip_initialization"):
        saver.save()
    assert by_images(saver.restore())
    assert differences(job, plan.undisturbed(1)) == []
