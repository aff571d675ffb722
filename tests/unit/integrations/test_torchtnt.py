"""Interrupt and resume runs of TorchTNT's units that have more modules, or read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.crash.save_sweep import alone
from tests.unit.integrations.test_trainers import (
    CUT,
    EVERY,
    STEPS,
    Net,
    Reader,
    loader,
    optimizer,
    until,
    values,
)
from torchrec_checknrun import RngState

pytest.importorskip("torchtnt.framework.callback", exc_type=ImportError)

from torchtnt.framework.auto_unit import AutoUnit  # may be absent
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit

from torchrec_checknrun.integrations.torchtnt import CheckNRun  # needs TorchTNT

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Unit(TrainUnit[int]):
    """A unit with an average of the model's dense part, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()
        self.over = self.module.over  # a part of the model, which is saved with it
        self.average, self.head = AveragedModel(self.module.over), nn.Linear(1, 1)
        self.adam = torch.optim.Adam([*self.over.parameters(), *self.head.parameters()], lr=0.1)

    def train_step(self, state: Any, data: int) -> None:
        self.adam.zero_grad()
        self.head(self.module(data).reshape(1)).square().sum().backward()
        self.adam.step()
        self.average.update_parameters(self.over)

    def beside(self) -> list[torch.Tensor]:
        return [*self.average.state_dict().values(), *self.head.state_dict().values()]


class Ahead(AutoUnit[int]):
    """A unit as TorchTNT makes it, which reads a batch ahead."""

    def __init__(self) -> None:
        super().__init__(module=Net(), device=torch.device("cpu"))

    def compute_loss(self, state: Any, data: int) -> tuple[torch.Tensor, None]:
        return self.module(data), None

    def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
        return optimizer(module)

    def move_data_to_device(self, state: Any, data: int, non_blocking: bool) -> int:
        return data


class NotAhead(Ahead):
    def get_next_train_batch(self, state: Any, data_iter: Any) -> Any:
        return self.move_data_to_device(state, next(data_iter), non_blocking=False)


def run(root: Path, unit: Any, cut: int | None) -> None:
    reader = Reader(cut)
    state = {"reader": reader, "rng": RngState()}
    saves = CheckNRun(root, state=state, every_steps=EVERY, when_busy="wait")
    with until(cut):
        train(unit, loader(reader), max_steps=STEPS, callbacks=[saves])


def lives(kind: Any, root: Path) -> tuple[Any, Any]:
    """Return the units of an uninterrupted and of a resumed run."""
    units = []
    for seed, place, cut in ((5, "whole", None), (5, "cut", CUT), (6, "cut", None)):
        torch.manual_seed(seed)
        units.append(kind())
        run(root / place, units[-1], cut)
    return units[0], units[2]


def test_modules_beside_the_model_come_back(tmp_path: Path) -> None:
    wanted, found = lives(Unit, tmp_path)
    assert all(map(torch.equal, wanted.beside(), found.beside()))
    assert all(map(torch.equal, values(wanted.module), values(found.module)))


def test_a_unit_that_reads_ahead_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, Ahead(), None)
    (line,) = [each for each in caplog.messages if "a batch ahead" in each]
    assert "Ahead reads a batch ahead" in line
    assert "('reader')" in line


def test_a_unit_that_does_not_read_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, found = lives(NotAhead, tmp_path)
    assert all(map(torch.equal, values(wanted.module), values(found.module)))
    assert "a batch ahead" not in caplog.text
