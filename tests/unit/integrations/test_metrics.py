"""Turn reports into flat dicts of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from tests.unit.tracked_model import train
from torchrec_checknrun import Checkpointer


def test_metrics_of_reports(model: nn.Module, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", model=model, policy="consecutive") as checkpointer:
        full = checkpointer.save()
        train(model, a=[[1, 2]])
        checkpointer.steps += 1
        report = checkpointer.save()
        restored = checkpointer.restore()
    assert restored is not None
    metrics = report.metrics()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["checkpoint/modified_rows"] == 2
    assert metrics["checkpoint/total_bytes"] == sum(report.bytes.values())
    assert metrics["checkpoint/bytes/dense"] == report.bytes["dense"]
    assert metrics["checkpoint/fraction/ebc.embedding_bags.wide"] == 2 / 30
    assert metrics["checkpoint/stall_seconds"] == report.stall_seconds
    assert (metrics["checkpoint/full"], full.metrics("x.")["x.full"]) == (0, 1)
    assert "checkpoint/error_mean" not in metrics, "exact rows have no error"
    assert metrics.keys() == full.metrics().keys()
    back = restored.metrics()
    assert (back["restore/chain"], back["restore/step"], back["restore/lossy"]) == (2, 1, 0)
    with SummaryWriter(str(tmp_path / "board")) as board:
        for name, value in {**metrics, **back}.items():
            board.add_scalar(name, torch.tensor(value), report.step)
