"""Interrupt and resume runs of Lightning's Trainer with callbacks and hooks that keep state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
from torchrec_checknrun import AtEnd, RngState

pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

from torchrec_checknrun.integrations.lightning import CheckNRun  # noqa: E402  # needs Lightning

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Module(pl.LightningModule):  # type: ignore[name-defined]  # may be absent
    """A module that averages a bias in its own hook of a batch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("mean", torch.zeros(1))

    def training_step(self, number: int, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(number)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        bias: Any = self.net.over[1].bias
        self.mean.lerp_(bias.detach(), 0.25)

    def configure_optimizers(self) -> Any:
        return optimizer(self.net)[0]


class Average(pl.Callback):  # type: ignore[name-defined]  # may be absent
    """A callback that averages the same bias, and stops where that has happened often enough."""

    def __init__(self, most: int = 1000) -> None:
        self.mean, self.count, self.most = torch.zeros(1), 0, most

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.mean = self.mean.lerp(module.net.over[1].bias.detach(), 0.25)
        self.count += 1
        trainer.should_stop = self.count == self.most

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean, self.count = state_dict["mean"], state_dict["count"]


class Writes(Average):
    """A callback that adds to Lightning's own checkpoints."""

    def on_save_checkpoint(self, *_: Any) -> None:
        raise NotImplementedError  # Lightning saves nothing here


class Data(pl.LightningDataModule):  # type: ignore[name-defined]  # may be absent
    """Data with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def train_dataloader(self) -> Any:
        return loader(Reader(None))


def fit(root: Path, cut: int | None, before: Any = (), after: Any = (), data: Any = None) -> Module:
    """Train with callbacks before and after the one that saves."""
    module, reader = Module(), Reader(cut)
    state = {"reader": reader, "rng": RngState()}
    saves = CheckNRun(root, state=state, every_steps=EVERY, when_busy="wait", triggers=[AtEnd()])
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[*before, saves, *after],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with until(cut):
        trainer.fit(module, *([loader(reader)] if data is None else []), datamodule=data)
    assert "on_train_batch_end" not in vars(module)
    assert saves.checkpointer is None
    return module


@pytest.mark.parametrize("place", ["before", "after"])
def test_states_of_callbacks_and_what_hooks_change_come_back(place: str, tmp_path: Path) -> None:
    whole, killed, resumed = Average(), Average(), Average()
    torch.manual_seed(5)
    wanted = fit(tmp_path / "whole", None, **{place: [whole]})
    torch.manual_seed(5)
    fit(tmp_path / "cut", CUT, **{place: [killed]})
    torch.manual_seed(6)  # another seed than the first attempt's
    found = fit(tmp_path / "cut", None, **{place: [resumed]})
    assert (resumed.count, resumed.mean) == (whole.count, whole.mean) == (STEPS, whole.mean)
    assert torch.equal(found.mean, wanted.mean)
    assert all(map(torch.equal, values(wanted.net), values(found.net)))


def test_a_resumed_run_stops_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    fit(tmp_path, CUT, before=[Average(STEPS - 1)])
    last = Average(STEPS - 1)
    fit(tmp_path, None, before=[last])
    assert last.count == STEPS - 1


def test_a_run_that_is_over_lets_go_of_its_root(tmp_path: Path) -> None:
    wanted = fit(tmp_path, None)
    found = fit(tmp_path, None)  # Lightning trains nothing: neither begin nor end of training
    assert all(map(torch.equal, values(wanted.net), values(found.net)))


def test_a_few_batches_tried_out_leave_no_checkpoint(tmp_path: Path) -> None:
    module, reader = Module(), Reader(None)
    saves = CheckNRun(tmp_path / "run", state={"reader": reader}, every_steps=1)
    options = {"enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", fast_dev_run=True, callbacks=[saves], **options).fit(
        module, loader(reader)
    )
    assert not (tmp_path / "run").exists()


def test_what_hooks_would_add_to_lightnings_checkpoints_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path / "one", None, before=[Average()])
    assert "Lightning's checkpoints" not in caplog.text
    fit(tmp_path / "two", None, before=[Writes()], data=Data())
    (line,) = [each for each in caplog.messages if "Lightning's checkpoints" in each]
    assert "what Writes.on_save_checkpoint, Data.state_dict would add" in line
