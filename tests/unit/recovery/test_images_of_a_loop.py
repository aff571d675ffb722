"""Go on from images in a training loop of its own: several optimizers, schedules, skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.models import Job
from tests.examples import some_of
from tests.unit.run.jobs import make_job
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

ACCUMULATED = 2
BAD = frozenset({2, 5})
"""Steps whose second backward pass raises, after its tables were updated."""


class Skipped(Exception):
    """Raised in the middle of a step, as by a check of the loss."""


class Loop:
    """A loop with two dense optimizers, a schedule that changes a rate at every step, gradients
    that are accumulated, evaluation in between, and steps that fail and are skipped.
    """

    def __init__(self, seed: int) -> None:
        self.job: Job = make_job(seed)
        names = dict(in_backward_optimizer_filter(self.job.model.named_parameters()))
        parameters = list(names.values())
        self.adam = Adam(parameters[:1], lr=0.05)
        self.sgd = SGD(parameters[1:], lr=0.05, momentum=0.9)
        self.schedules = [ExponentialLR(each, 0.9) for each in (self.adam, self.sgd)]
        self.step_number = 0

    @property
    def states(self) -> dict[str, Any]:
        return {
            **{"adam": self.adam, "sgd": self.sgd, "loop": self},
            **{f"schedule {i}": each for i, each in enumerate(self.schedules)},
        }

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_number = state["step"]

    def _backward(self, number: int, fails: bool) -> None:
        loss = self.job.loss(*self.job.batch(ACCUMULATED * self.step_number + number))
        loss.backward()
        if fails:
            raise Skipped

    def step(self) -> None:
        """Train a step, or skip it half-way, then evaluate."""
        try:
            for number in range(ACCUMULATED):
                self._backward(number, fails=number == 1 and self.step_number in BAD)
            self.adam.step()
            self.sgd.step()
        except Skipped:
            pass
        for optimizer in (self.adam, self.sgd):
            optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()
        self.step_number += 1
        with torch.no_grad():
            self.job.model.eval()
            self.job.loss(*self.job.batch(1000))
            self.job.model.train()

    def content(self) -> dict[str, Any]:
        """Return all that training has made, to the bit."""
        found: dict[str, Any] = {n: bits(p) for n, p in self.job.model.named_parameters()}
        for name, optimizer in (("adam", self.adam), ("sgd", self.sgd)):
            for i, state in enumerate(optimizer.state.values()):
                found |= {f"{name} {i} {k}": bits(v) for k, v in state.items()}
            found[f"{name} rate"] = optimizer.param_groups[0]["lr"]
        for table, states in self.job.model.fused_optimizer.state_dict()["state"].items():
            for key, value in states.items():
                shards = value.local_shards() if hasattr(value, "local_shards") else []
                found |= {f"{table} {key} {i}": bits(s.tensor) for i, s in enumerate(shards)}
        found["loop"] = self.step_number
        return found


def bits(value: Any) -> Any:
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def saver_of(loop: Loop, root: Path, memory: Path | None, **options: Any) -> Checkpointer:
    survive = None if memory is None else Images(folder=str(memory))
    return Checkpointer(root, model=loop.job.model, state=loop.states, survive=survive, **options)


@pytest.mark.parametrize("dies_after", some_of([1, 2, 3, 5, 6, 7], 0, 2, 4))
def test_the_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path, dies_after: int) -> None:
    wanted = Loop(seed=0)
    for _ in range(9):
        wanted.step()
    memory = tmp_path / "memory"
    memory.mkdir()
    loop = Loop(seed=0)
    saver = saver_of(loop, tmp_path / "root", memory, every_steps=2)
    assert saver.restore() is None
    beside = saver_of(loop, tmp_path / "beside", None, every_steps=3)
    for _ in range(dies_after):
        loop.step()
        saver.step()
        beside.step()
    loop._backward(0, fails=False)  # the step that is torn
    saver._saver.settle(wait=True)
    beside._release(failed=True)
    saver._release(failed=True)
    files._mapped.clear()
    again = Loop(seed=3)
    saver = saver_of(again, tmp_path / "root", memory, every_steps=2)
    report = saver.restore()
    assert report is not None
    assert (report.source, again.step_number) == ("images", dies_after), report.without_images
    while again.step_number < 9:
        again.step()
        saver.step()
    now = again.content()
    assert [name for name, value in wanted.content().items() if now[name] != value] == []
    saver.close()
    other = Loop(seed=5)
    with saver_of(other, tmp_path / "root", None) as restoring:
        found = restoring.restore()
    assert found is not None
    assert other.step_number == found.step


def test_gradients_lie_in_the_same_places_from_the_first_step_on(tmp_path: Path) -> None:
    """Vector units sum the gradients of a parameter in an order that depends on their place."""
    loop = Loop(0)
    parameters = [p for g in (*loop.adam.param_groups, *loop.sgd.param_groups) for p in g["params"]]
    places = []
    with Checkpointer(tmp_path, model=loop.job.model, state=loop.states, survive=Images()) as saver:
        saver.restore()
        for _ in range(3):
            loop.job.train()
            places.append([p.grad.storage_offset() for p in parameters if p.grad is not None])
            saver.step()
    assert any(places[0])
    assert places == [places[0]] * 3
