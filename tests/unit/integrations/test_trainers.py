"""Interrupt and resume runs under the callbacks of Lightning and TorchTNT.

The resumed run must end like an uninterrupted one. The model of one rank has tables, a dense layer,
a schedule and a reader; the cut comes between two checkpoints. Each half runs where its library is
installed.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.crash.save_sweep import alone
from tests.unit.tracked_model import DIM, batch, make_model
from torchrec_checknrun import Checkpointer, OnSigterm, RestoreReport, RngState

STEPS, CUT, EVERY = 9, 7, 3


class Stop(Exception):
    """An error that ends a run from within the loop."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = make_model()
        torch.manual_seed(1)
        self.over = nn.Sequential(nn.Dropout(0.5), nn.Linear(4 * DIM, 1))

    def forward(self, number: int) -> torch.Tensor:
        rows = [[number % 30, (7 * number) % 30]]
        loss: torch.Tensor = self.over(self.tables(batch(a=rows, shared=rows))).square().sum()
        return loss


class Reader(IterableDataset[int]):
    """A reader of batch numbers that knows its place, and can fail there."""

    def __init__(self, cut: int | None) -> None:
        self.position, self._cut = 0, cut

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        while True:
            if self.position == self._cut:
                raise Stop
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def loader(reader: Reader) -> DataLoader[int]:
    """Return a loader with a generator of its own. Otherwise each new loader would draw a seed from
    the global generator, and change the dropout's numbers.
    """
    return DataLoader(reader, batch_size=None, generator=torch.Generator())


def optimizer(net: Net) -> tuple[torch.optim.Optimizer, Any]:
    adam = torch.optim.Adam(net.over.parameters(), lr=0.1)
    return adam, torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)


def values(net: Net) -> list[torch.Tensor]:
    """Return all live values: dense parameters, tables and their optimizers' rows."""
    found = [p.detach().clone() for p in net.over.parameters()]
    for name, value in net.tables.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [value]
        found += [getattr(shard, "tensor", shard).detach().clone() for shard in shards]
        assert name
    fused = net.tables.fused_optimizer.state_dict()["state"]  # type: ignore[union-attr]  # a DMP
    for state in fused.values():
        for value in state.values():
            shards = value.local_shards() if hasattr(value, "local_shards") else []
            found += [shard.tensor.detach().clone() for shard in shards]
    return found


Run = Callable[[Path, "int | None"], "tuple[Net, int, float]"]
"""A function that trains from a root until a cut; returns the model, the trainer's steps, the rate.
"""


def lightning(root: Path, cut: int | None, plateau: str | None = None) -> tuple[Net, int, float]:
    """Run Lightning's Trainer.

    Args:
        plateau: interval of a schedule that waits for the loss, in place of the usual one.
    """
    pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from torchrec_checknrun.integrations.lightning import CheckNRun

    class Module(pl.LightningModule):  # type: ignore[name-defined]  # may be absent
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, number: int, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(number)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            adam, schedule = optimizer(self.net)
            if plateau is not None:
                waiting = torch.optim.lr_scheduler.ReduceLROnPlateau(adam)
                return [adam], [{"scheduler": waiting, "interval": plateau, "monitor": "loss"}]
            return [adam], [{"scheduler": schedule, "interval": "step"}]

    module, reader = Module(), Reader(cut)
    callback = CheckNRun(
        root, state={"reader": reader, "rng": RngState()}, every_steps=EVERY, when_busy="wait"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with until(cut):
        trainer.fit(module, loader(reader))
    assert callback.checkpointer is None
    return module.net, trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]


def torchtnt(root: Path, cut: int | None) -> tuple[Net, int, float]:
    """Run TorchTNT's ``train``."""
    pytest.importorskip("torchtnt.framework.callback", exc_type=ImportError)
    from torchtnt.framework.state import State
    from torchtnt.framework.train import train
    from torchtnt.framework.unit import TrainUnit

    from torchrec_checknrun.integrations.torchtnt import CheckNRun

    class Unit(TrainUnit[int]):
        def __init__(self) -> None:
            super().__init__()
            self.module = Net()
            self.adam, self.schedule = optimizer(self.module)
            self.reader, self.rng = Reader(cut), RngState().state

        def train_step(self, state: State, data: int) -> None:
            self.adam.zero_grad()
            self.module(data).backward()
            self.adam.step()
            self.schedule.step()

    unit = Unit()
    callback = CheckNRun(root, every_steps=EVERY, when_busy="wait")
    with until(cut):
        train(unit, loader(unit.reader), max_steps=STEPS, callbacks=[callback])
    assert callback.checkpointer is None
    steps: int = unit.train_progress.num_steps_completed
    return unit.module, steps, unit.adam.param_groups[0]["lr"]


def until(cut: int | None) -> Any:
    """Expect the cut, if any."""
    return pytest.raises(Stop) if cut is not None else alone()


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


def seed(number: int) -> None:
    torch.manual_seed(number)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [lightning, torchtnt])
def test_a_resumed_run_ends_like_an_uninterrupted_one(run: Run, tmp_path: Path) -> None:
    seed(5)
    net, steps, rate = run(tmp_path / "whole", None)
    assert steps == STEPS
    seed(5)
    run(tmp_path / "cut", CUT)
    seed(6)  # another seed than the first attempt's
    resumed, resumed_steps, resumed_rate = run(tmp_path / "cut", None)
    assert (resumed_steps, resumed_rate) == (steps, rate)
    wanted, found = values(net), values(resumed)
    assert len(wanted) == len(found) > 5
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [lightning, torchtnt])
def test_an_earlier_checkpoint_by_an_override(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a program restore in its own way: what errors of a restore advise needs arguments."""
    run(tmp_path, None)
    first = min(path.name for path in tmp_path.glob("seq-*"))
    restored = []

    def restore(_: Any, checkpointer: Checkpointer) -> RestoreReport | None:
        restored.append(report := checkpointer.restore(first, strict=False))
        return report

    module = importlib.import_module(f"torchrec_checknrun.integrations.{run.__name__}")
    monkeypatch.setattr(module.CheckNRun, "restore", restore)
    _, steps, _ = run(tmp_path, None)
    assert [report and report.step for report in restored] == [EVERY]
    assert steps == STEPS


@pytest.mark.filterwarnings("ignore")
def test_a_loader_without_length_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warn of such loaders: Lightning takes a batch ahead, and a reader's place is one too far."""
    lightning(tmp_path / "with", None)
    assert "no length" not in caplog.text
    monkeypatch.delattr(Reader, "__len__")
    lightning(tmp_path / "without", None)
    assert "'reader', 'rng'" in caplog.text
    assert "no length" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("interval", "told"),
    [
        ("epoch", "Lightning does not step ReduceLROnPlateau"),
        ("step", "Lightning steps ReduceLROnPlateau after a batch's last hook"),
    ],
)
def test_a_schedule_that_lightning_does_not_step_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: str, told: str
) -> None:
    """Lightning leaves out the step at the end of an epoch that it resumes in, and makes that of a
    batch after the checkpoint.
    """
    lightning(tmp_path, CUT, interval)
    assert "ReduceLROnPlateau" not in caplog.text
    lightning(tmp_path, None, interval)
    assert caplog.text.count(told) == caplog.text.count("ReduceLROnPlateau") == 1


def test_lightning_handles_sigterm_itself(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from torchrec_checknrun.integrations.lightning import CheckNRun

    with pytest.raises(ValueError, match="Lightning handles SIGTERM itself"):
        CheckNRun(tmp_path, triggers=[OnSigterm()])


@pytest.mark.parametrize("library", ["lightning", "torchtnt"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "torchtnt"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return wanted(name, *arguments, **options)

    module = f"torchrec_checknrun.integrations.{library}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ImportError, match=rf"pip install 'torchrec_checknrun\[{library}\]'"):
        importlib.import_module(module)
