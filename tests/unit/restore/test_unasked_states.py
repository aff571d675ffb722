"""A restore without a state object that the checkpoint has says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer


class Counter:
    """A state object."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_is_not_given_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    root, model = str(tmp_path), nn.Linear(2, 2)
    with alone():
        with Checkpointer(root, model=model, state={"a": Counter(), "b": Counter()}) as saver:
            saved = saver.save()
        with Checkpointer(root, model=model, state={"a": Counter()}) as saver:
            report = saver.restore(strict=strict)
    assert report is not None
    (line,) = (m for m in caplog.messages if "not restored" in m)
    assert f"{saved.id} holds state 'b', which is not restored" in line
    assert caplog.records[caplog.messages.index(line)].levelno == logging.WARNING
