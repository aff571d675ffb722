"""Save the state of the optimizers that step data-parallel tables now, and the rows they step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.unit.mixed_job import Job
from torchrec_checknrun import Images
from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = pytest.mark.usefixtures("group")

TABLE = "sparse.ebc.embedding_bags.wide"
Make = Callable[[Iterable[Any]], Optimizer]


def adagrad(parameters: Iterable[Any]) -> Optimizer:
    return Adagrad(parameters, lr=0.1)


def sgd(parameters: Iterable[Any]) -> Optimizer:
    return SGD(parameters, lr=0.2)


def momentum(parameters: Iterable[Any]) -> Optimizer:
    return SGD(parameters, lr=0.2, momentum=0.9)


def adam(parameters: Iterable[Any]) -> Optimizer:
    return Adam(parameters, lr=0.3)


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return AdamW(parameters, lr=0.3)


def train(job: Job, steps: int = 1) -> None:
    for _ in range(steps):
        job.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def as_a_part(job: Job, make: Make) -> None:
    """Put another optimizer in the place of a combined optimizer's part."""
    job.dense = KeyedOptimizerWrapper(job.dense.params, make)
    job.optimizer._optims[1] = ("dense", job.dense)


def inside_its_wrapper(job: Job, make: Make) -> None:
    """Put another optimizer inside the wrapper that names its parameters."""
    inner = make(list(job.dense.params.values()))
    job.dense._optimizer = inner
    job.dense.state, job.dense.param_groups = inner.state, inner.param_groups


def states(job: Job) -> dict[str, Any]:
    """Return the dense optimizer's whole state by name, and the clock of the table."""
    found: dict[str, Any] = {TABLE: job.saver._target.tracked.progress().get(TABLE)}
    for name, parameter in job.dense.params.items():
        for key, value in job.dense._optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def assert_same(found: Job, wanted: Job) -> None:
    for name, parameter in wanted.model.named_parameters():
        assert torch.equal(parameter, dict(found.model.named_parameters())[name]), name
    left, right = states(found), states(wanted)
    assert left.keys() == right.keys()
    for name, value in right.items():
        same = torch.equal(left[name], value) if isinstance(value, torch.Tensor) else None
        assert same if same is not None else left[name] == value, name


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[Make], Job]]:
    """Make jobs with the same root, of which one at a time saves."""
    jobs: list[Job] = []

    def make(dense: Make) -> Job:
        jobs.append(Job(tmp_path / "run", dense))
        return jobs[-1]

    yield make
    for job in jobs:
        job.saver.close()


@pytest.mark.parametrize("replace", [as_a_part, inside_its_wrapper])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (adagrad, adagrad),
        (adam, adam),
        (adam, adamw),
        (adagrad, adam),
        (adam, adagrad),
        (adam, sgd),
        (sgd, adam),
        (sgd, momentum),
    ],
)
def test_the_state_is_that_of_the_present_optimizer(
    made: Callable[[Make], Job], replace: Callable[[Job, Make], None], before: Make, after: Make
) -> None:
    job = made(before)
    train(job, 3)
    assert job.saves()
    replace(job, after)
    train(job)
    assert job.saves()
    train(job)
    assert job.saves()
    other = made(after)
    assert other.saver.restore() is not None
    assert_same(other, job)
    train(job)
    train(other)
    assert_same(other, job)


def test_a_clock_is_that_of_the_present_optimizer(made: Callable[[Make], Job]) -> None:
    job = made(adam)
    train(job, 3)
    tracked = job.saver._target.tracked
    assert tracked.progress()[TABLE] == OptimizerClock(3, 0.3)
    as_a_part(job, adamw)
    train(job)
    assert job.saves()
    assert tracked.progress()[TABLE] == OptimizerClock(1, 0.3)


@pytest.mark.skipif(not has_extension(), reason="the extension was not built")
@pytest.mark.parametrize("replace", [as_a_part, inside_its_wrapper])
@pytest.mark.parametrize(("before", "after"), [(adam, adam), (adagrad, adam), (adam, sgd)])
def test_an_image_holds_the_state_of_the_present_optimizer(
    tmp_path: Path, replace: Callable[[Job, Make], None], before: Make, after: Make
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    images = Images(folder=str(memory))
    job = Job(tmp_path / "run", before, survive=images)
    assert job.saver.restore() is None
    for turn in range(5):
        if turn == 2:
            replace(job, after)
        train(job)
        job.saver.step()
    job.saver._release(failed=True)  # as a killed process
    files._mapped.clear()
    other = Job(tmp_path / "run", after, survive=images)
    report = other.saver.restore()
    assert report is not None
    assert report.source == "images"
    assert_same(other, job)
    train(job)
    train(other)
    assert_same(other, job)
    other.saver.close()


def other_data(job: Job) -> Callable[[], None]:
    weight: Any = job.model.module.sparse.ebc.embedding_bags.wide.weight
    earlier = weight.data
    weight.data = torch.full_like(earlier, 3.0)

    def back() -> None:
        weight.data = earlier

    return back


def other_parameter(job: Job) -> Callable[[], None]:
    table: Any = job.model.module.sparse.ebc.embedding_bags.wide
    earlier = table.weight
    table.weight = nn.Parameter(torch.full_like(earlier, 3.0))

    def back() -> None:
        table.weight = earlier

    return back


def other_memory_of_the_kernel(job: Job) -> Callable[[], None]:
    (shard,) = (s for s in job.saver._target.tracked.shards if s.table == TABLE)
    kernel: Any = shard.kernel_module
    weights = kernel._emb_module.weights
    earlier = weights.data
    weights.data = torch.full_like(earlier, 3.0)

    def back() -> None:
        weights.data = earlier

    return back


@pytest.mark.parametrize("replace", [other_data, other_parameter, other_memory_of_the_kernel])
def test_a_parameter_beside_its_kernels_memory_is_refused(
    made: Callable[[Make], Job], replace: Callable[[Job], Callable[[], None]]
) -> None:
    """Refuse to save, and to restore, as long as lookups and optimizers use different rows."""
    job = made(adagrad)
    train(job)
    assert job.saves()
    back = replace(job)
    for _ in range(2):
        with pytest.raises(UnsupportedTable, match=f"{TABLE}.*copy_"):
            job.saves()
    with pytest.raises(UnsupportedTable, match=TABLE):
        job.saver.restore()
    back()
    train(job)
    assert job.saves()
    other = made(adagrad)
    assert other.saver.restore() is not None
    assert_same(other, job)
