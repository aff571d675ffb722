"""Train in odd ways right after a cut: each checkpoint is of its cut, or the save fails, told.

Nothing is copied in the background before the odd thing is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.models import Job
from tests.distributed.on_write import Held, build, checkpointer, differences, held_copiers
from tests.distributed.states import gather
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.snapshot import late_copies, staging

pytestmark = pytest.mark.usefixtures("one_rank")


def dense_of(job: Job) -> list[torch.Tensor]:
    return [p for name, p in job.model.named_parameters() if "embedding" not in name]


def step_twice(job: Job) -> None:
    job.train()
    job.optimizer.step()


def step_first(job: Job) -> None:
    for parameter in dense_of(job):
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()


def step_with_a_closure(job: Job) -> None:
    lbfgs = torch.optim.LBFGS(dense_of(job), lr=0.1)

    def closure() -> torch.Tensor:
        loss = sum((p.square().sum() for p in dense_of(job)), torch.zeros(()))
        lbfgs.zero_grad()
        loss.backward()
        return loss

    lbfgs.step(closure)


def step_by_another(job: Job) -> None:
    other = torch.optim.SGD(dense_of(job), lr=0.5)
    job.train()
    step_first(job)
    other.step()


def evaluate(job: Job) -> None:
    job.model.eval()
    job.train()  # updates rows all the same
    job.model.train()
    job.train()


def freeze(job: Job) -> None:
    for parameter in dense_of(job):
        parameter.requires_grad_(False)
    job.train()
    for parameter in dense_of(job):
        parameter.requires_grad_(True)
    job.train()


def schedule(job: Job) -> None:
    job.train()
    for group in job.optimizer.param_groups:
        group["lr"] = 0.9
    job.train()


def clip_weights(job: Job) -> None:
    job.train()
    with torch.no_grad():
        for parameter in dense_of(job):
            parameter.clamp_(-0.01, 0.01)


def scale_weights(job: Job) -> None:
    with torch.no_grad():
        torch._foreach_mul_(dense_of(job), 2.0)


def load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.train()


def load_model(job: Job) -> None:
    job.model.load_state_dict(job.model.state_dict())
    job.train()


def replace_memory(job: Job) -> None:
    for parameter in dense_of(job):
        parameter.data = torch.zeros_like(parameter.data)
    job.train()


def lose_states(job: Job) -> None:
    dense = dict(job.optimizer.optimizers)["dense"]
    for state in dense.state.values():
        state.clear()


EXACT: list[Callable[[Job], None]] = [
    step_twice,
    step_first,
    step_with_a_closure,
    step_by_another,
    evaluate,
    freeze,
    schedule,
    clip_weights,
    replace_memory,
    lose_states,
]
TOLD: list[Callable[[Job], None]] = [scale_weights, load_optimizer, load_model]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Held, threading.Event]]:
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    for module in (late_copies, staging):  # the job's parameters are small
        monkeypatch.setattr(module, "LEAST_BYTES", 1)
    go, make = threading.Event(), LocalPart.make_late_copies

    def wait_and_make(part: LocalPart) -> None:
        assert go.wait(60)
        make(part)

    monkeypatch.setattr(LocalPart, "make_late_copies", wait_and_make)
    with held_copiers() as copiers:
        yield copiers, go
        go.set()


def save_beside(
    act: Callable[[Job], None], held: tuple[Held, threading.Event], root: Path
) -> list[str]:
    """Save, and act before anything is copied; return how the checkpoint differs from the cut."""
    copiers, go = held
    job = build()
    go.set()
    with checkpointer(root, job) as saver:
        job.train()
        saver.save()
        job.train()
        saver.steps += 1
        go.clear()
        copiers.hold()
        wanted = gather(job)
        saver.save(wait=False)
        act(job)
        go.set()
        copiers.let_go()
        saver.wait()
    return differences(root, wanted)


@pytest.mark.parametrize("act", EXACT, ids=lambda act: act.__name__)
def test_of_the_cut(
    act: Callable[[Job], None], held: tuple[Held, threading.Event], tmp_path: Path
) -> None:
    assert save_beside(act, held, tmp_path) == []


@pytest.mark.parametrize("act", TOLD, ids=lambda act: act.__name__)
def test_told(
    act: Callable[[Job], None], held: tuple[Held, threading.Event], tmp_path: Path
) -> None:
    with pytest.raises(SaveFailed, match="written"):
        save_beside(act, held, tmp_path)
