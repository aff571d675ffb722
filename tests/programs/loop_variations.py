"""Vary the quick start's loop as teams do: dropped steps, evaluation, metrics, buffers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import CombinedOptimizer

from tests.programs.quickstart import DIM, ROWS, Net
from tests.programs.training import Training
from torchrec_checknrun import PerRank


class Accumulated(Training):
    """A loop whose dense optimizer steps every other batch."""

    def turn(self, number: int, batch: Batch) -> None:
        (self.model(batch) / 2).backward()
        if number % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Dropped(Training):
    """A loop that drops the gradients of many batches in a row, as after a NaN, and still saves."""

    def turn(self, number: int, batch: Batch) -> None:
        self.model(batch).backward()
        if not 5 <= number <= 14:
            self.optimizer.step()
        self.optimizer.zero_grad()


class Scaled(Training):
    """A loop with scaled losses; the scaler skips the dense optimizer's step upon an overflow."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.state["scaler"] = self.scaler

    def turn(self, number: int, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch)).backward()
        if number == 7:
            self.model.module.over[0].bias.grad.fill_(torch.inf)
        self.scaler.step(self.inner)
        self.scaler.update()


class Evaluated(Training):
    """A loop that also looks rows up without training them, which kernels count."""

    def after(self, number: int, batch: Batch) -> None:
        if number % 2 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(batch)
            self.model.train()


class NormalisedNet(Net):
    """The same net, with the dense features normalised over each rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.over.insert(0, nn.BatchNorm1d(3 + DIM * len(ROWS)))


class Normalised(Training):
    """A loop with running statistics, which are each rank's own and declared so."""

    net = NormalisedNet
    options: ClassVar[dict[str, Any]] = {"per_rank_buffers": ["*.running_*"]}


class Scores:
    """A metric that keeps all samples seen, on each rank its own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0)

    def update(self, scores: torch.Tensor) -> None:
        self.seen = torch.cat([self.seen, scores])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class GrowingMetric(Training):
    def prepare(self) -> None:
        self.scores = Scores()
        self.state["scores"] = PerRank(self.scores)

    def after(self, number: int, batch: Batch) -> None:
        self.scores.update(batch.labels.float() * number)


class Replay:
    """The last few batches' dense features by their number, and those to train once more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: dict[str, torch.Tensor] = {}
        self.draw = torch.Generator().manual_seed(1)

    def add(self, number: int, value: torch.Tensor) -> None:
        self.kept[str(number)] = value
        if len(self.kept) > self.size:
            del self.kept[next(iter(self.kept))]

    def sample(self) -> torch.Tensor:
        index = int(torch.randint(len(self.kept), (), generator=self.draw))
        return list(self.kept.values())[index]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state["kept"])
        self.draw.set_state(state["draw"])


class ReplayBuffer(Training):
    """A loop with a buffer whose keys come and go, and whose order counts."""

    def prepare(self) -> None:
        self.replay = Replay(4)
        self.state["replay"] = PerRank(self.replay)

    def turn(self, number: int, batch: Batch) -> None:
        if number > 1:
            batch.dense_features = batch.dense_features + self.replay.sample()
        super().turn(number, batch)
        self.replay.add(number, batch.dense_features / 2)


class Tempered(nn.Module):
    """A team's own module around two sharded models of the same tables' names."""

    def __init__(self, net: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"main": net, "other": other})
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> torch.Tensor:
        losses = [tower(batch) for tower in self.towers.values()]
        return self.temperature * torch.stack(losses).sum()


class InsideAnother(Training):
    """A loop over sharded models inside a module, whose optimizers don't know its name for them."""

    def prepare(self) -> None:
        other = Training()
        self.model = Tempered(self.model, other.model)
        self.others = CombinedOptimizer([("rest", other.optimizer)])
        self.cooling = torch.optim.SGD([self.model.temperature], lr=0.01, momentum=0.9)
        self.state |= {"others": self.others, "cooling": self.cooling}

    def turn(self, number: int, batch: Batch) -> None:
        optimizers = (self.optimizer, self.others, self.cooling)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.model(batch).backward()
        gradient = self.model.temperature.grad
        assert gradient is not None
        dist.all_reduce(gradient)
        for optimizer in optimizers:
            optimizer.step()


class Averaged(Training):
    """A loop with a running average of the dense layers."""

    def prepare(self) -> None:
        self.average = AveragedModel(self.model.module.over)
        self.state["average"] = self.average

    def after(self, number: int, batch: Batch) -> None:
        self.average.update_parameters(self.model.module.over)
