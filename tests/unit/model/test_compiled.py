"""Save models that ``torch.compile`` has wrapped or compiled in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import some_of
from tests.unit.mixed_job import Job
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import IncompatibleCheckpoint

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def in_place(job: Job) -> Any:
    job.model.compile(backend="eager")
    return job.model


def wrapped(job: Job) -> Any:
    return torch.compile(job.model, backend="eager")


def plain(job: Job) -> Any:
    return job.model


def make(root: Path, compiled: Callable[[Job], Any]) -> tuple[Job, Any, Checkpointer]:
    """Make a job with a Checkpointer of its compiled model."""
    job = Job(root / "own", lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    job.saver.close()
    model = compiled(job)
    state = {"optimizer": job.optimizer}
    saver = Checkpointer(root / "root", model=model, state=state, policy=Consecutive())
    return job, model, saver


def train(job: Job, model: Any, saver: Checkpointer, steps: int) -> None:
    for _ in range(steps):
        job.optimizer.zero_grad()
        model(a=[[1, 2]], shared=[[3 + saver.steps]], b=[[4]]).backward()
        job.optimizer.step()
        saver.step()


def content(job: Job) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = job.model.state_dict()
    local = {n: v.local_shards() if hasattr(v, "local_shards") else v for n, v in found.items()}
    return {
        f"{name} {i}": part.detach().clone()
        for name, value in local.items()
        for i, part in enumerate(
            [shard.tensor for shard in value] if isinstance(value, list) else [value]
        )
    }


@pytest.mark.skipif(
    version("torchrec").startswith("1.7."),
    reason="TorchRec 1.7 can't train compiled models on torch 2.12, with or without a Checkpointer",
)
@pytest.mark.parametrize(
    ("before", "after"),
    some_of([(in_place, in_place), (in_place, plain), (wrapped, wrapped)], 1),
)
def test_a_compiled_model_goes_on(
    tmp_path: Path, before: Callable[[Job], Any], after: Callable[[Job], Any]
) -> None:
    job, model, saver = make(tmp_path, before)
    with saver:
        for steps in (3, 2):
            train(job, model, saver, steps)
            report = saver.save()
        assert report is not None
        assert report.kind == "differential"
        assert 30 < report.modified_rows < 40  # Adam changes all 30 of the data-parallel table
        train(job, model, saver, 2)
    wanted = content(job)
    again, model, saver = make(tmp_path, after)
    with saver:
        train(again, model, saver, 1)
        assert saver.restore() is not None
        train(again, model, saver, 2)
    found = content(again)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def test_a_wrapped_models_names_are_others(tmp_path: Path) -> None:
    _, _, saver = make(tmp_path, wrapped)
    with saver:
        saver.save()
    _, _, saver = make(tmp_path, plain)
    with saver, pytest.raises(IncompatibleCheckpoint, match=r"'_orig_mod\..*only in the check"):
        saver.restore()
