"""Warn of state objects that show nothing, or something else, of what they hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.metrics.cpu_offloaded_metric_module import CPUOffloadedRecMetricModule
from torchrec.metrics.metrics_config import DefaultTaskInfo
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecMetricList

from tests.distributed.models import Job
from torchrec_checknrun import Checkpointer, PerRank

pytestmark = pytest.mark.usefixtures("one_rank")


class Metric(nn.Module):
    """A metric as torchmetrics makes them: its state shows once it is persistent."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self._persistent = persistent
        self.total = torch.zeros(())

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self._persistent:
            destination[f"{prefix}total"] = self.total


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (Metric(persistent=False), True),
        (Metric(persistent=True), False),
        (nn.MSELoss(), False),
        (torch.amp.GradScaler("cpu", enabled=False), False),
    ],
    ids=["hidden", "shown", "nothing", "disabled"],
)
def test_a_state_that_shows_nothing_is_told_of(
    tmp_path: Path, job: Job, state: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Checkpointer(tmp_path, model=job.model, state={"other": state}),
    ):
        pass
    found = [r for r in caplog.messages if "state 'other' holds tensors" in r]
    assert bool(found) == told


@pytest.mark.parametrize("inside", [False, True], ids=["state", "in_the_model"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "counts"])
def test_metrics_that_show_sums_over_ranks_are_told_of(
    tmp_path: Path, job: Job, whole: bool, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    entropy = NEMetric(1, 0, 1, [DefaultTaskInfo])
    metrics = CPUOffloadedRecMetricModule(
        torch.device("cpu"), batch_size=1, world_size=1, rec_metrics=RecMetricList([entropy])
    )
    try:
        if inside:
            job.model.module.metrics = metrics
        given = {"metrics": PerRank(metrics if whole else metrics.rec_metrics)}
        state = given if not (inside and whole) else {}
        with (
            caplog.at_level(logging.WARNING),
            Checkpointer(tmp_path, model=job.model, state=state),
        ):
            pass
    finally:
        metrics.shutdown()
    found = [r for r in caplog.messages if "shows the sums over all ranks" in r]
    assert len(found) == whole
