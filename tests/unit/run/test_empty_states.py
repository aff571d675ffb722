"""Warn of state objects that show nothing of what they hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import Job
from torchrec_checknrun import Checkpointer

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
