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


class EpochReader(Reader):
    """A reader of epochs of three batches, which knows whether it is within one."""

    def __init__(self, cut: int | None) -> None:
        super().__init__(cut)
        self.end: int | None = None  # of the epoch, if within one

    def __iter__(self) -> Iterator[int]:
        self.end = self.position + 3 if self.end is None else self.end
        while self.position < self.end:
            yield next(super().__iter__())
        self.end = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "end": self.end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.end = state["position"], state["end"]


def test_epochs_end_where_they_did(tmp_path: Path) -> None:
    """Go on from the last batch of an epoch (the third), and from the middle of one."""

    def trained(root: Path, cut: int | None, every: int) -> tuple[Unit, EpochReader]:
        torch.manual_seed(5)
        unit, reader = Unit(), EpochReader(cut)
        state = {"reader": reader, "rng": RngState()}
        saves = CheckNRun(root, state=state, every_steps=every, when_busy="wait")
        with until(cut):
            train(unit, loader(reader), max_epochs=3, callbacks=[saves])
        return unit, reader

    for every in (2, 3):
        wanted, whole = trained(tmp_path / f"whole{every}", None, every)
        trained(tmp_path / f"cut{every}", CUT, every)
        found, resumed = trained(tmp_path / f"cut{every}", None, every)
        assert resumed.position == whole.position == 9
        assert all(map(torch.equal, values(wanted.module), values(found.module)))
        again, over = trained(tmp_path / f"whole{every}", None, every)
        assert over.position == 9
        assert again.train_progress.num_epochs_completed == 3
