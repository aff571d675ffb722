"""Save a combined optimizer's parts that were given without a key, as TorchRec's examples do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveDeferred

pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = Model()
        self.hidden = nn.Linear(32, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.hidden(self.sparse(batch(**bags))))
        return out.square().sum()


class Job:
    """A net whose layers have an optimizer each; neither part has a key."""

    def __init__(self, root: Path, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net()
        apply_optimizer_in_backward(RowWiseAdagrad, net.sparse.parameters(), {"lr": 0.5})
        self.model = DistributedModelParallel(net, device=torch.device("cpu"))
        named = dict(self.model.named_parameters())

        def part(layer: str, make: Any) -> KeyedOptimizerWrapper:
            own = {name: p for name, p in named.items() if name.startswith(f"{layer}.")}
            return KeyedOptimizerWrapper(own, make)

        self.parts = [
            part("hidden", lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
            part("out", lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
        ]
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, *self.parts])
        self.saver = Checkpointer(root, model=self.model, state={"optimizer": self.optimizer})

    def backward(self) -> None:
        self.model(a=[[1, 2]], shared=[[3]], b=[[4]]).backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
            self.saver.steps += 1

    def content(self) -> dict[str, Any]:
        """Return each part's state, by parameter and name, and its rate."""
        found: dict[str, Any] = {}
        for number, part in enumerate(self.parts):
            inner = part._optimizer
            found[f"{number}.lr"] = inner.param_groups[0]["lr"]
            for i, parameter in enumerate(inner.param_groups[0]["params"]):
                found[f"{number}.{i}"] = parameter.detach().clone()
                for name, value in inner.state[parameter].items():
                    found[f"{number}.{i}.{name}"] = torch.as_tensor(value).clone()
        return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        name
        for name in sorted(found.keys() | wanted.keys())
        if name not in found
        or name not in wanted
        or not torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted[name]))
    ]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make() -> Job:
        made.append(Job(tmp_path / "root", seed=len(made)))
        return made[-1]

    yield make
    for job in made:
        job.saver.close()


def test_each_comes_back(jobs: Any) -> None:
    job = jobs()
    job.train(3)
    job.parts[0]._optimizer.param_groups[0]["lr"] = 0.003
    job.saver.save()
    wanted = job.content()
    later = jobs()
    assert later.saver.restore() is not None
    assert differences(later.content(), wanted) == []


def test_each_is_copied_before_its_next_step(jobs: Any) -> None:
    job = jobs()
    job.train(2)
    job.saver.save()
    job.train(1)
    wanted = job.content()
    job.saver.save(wait=False)
    job.train(3)
    report = job.saver.wait()
    later = jobs()
    restored = later.saver.restore(report.id)
    assert restored.step == 3
    assert differences(later.content(), wanted) == []


@pytest.mark.parametrize("stepped", [0, 1])
def test_gradients_of_the_other_one_wait(jobs: Any, stepped: int) -> None:
    job = jobs()
    job.train(1)
    job.optimizer.zero_grad()
    job.backward()
    job.parts[stepped].step()
    job.saver.steps += 1
    with pytest.raises(SaveDeferred):
        job.saver.save()
    job.parts[1 - stepped].step()
    job.saver.save()
