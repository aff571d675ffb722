"""Restore optimizers whose ``state_dict`` has a form of its own, or warn where that can't be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import optim
from torch.optim import Optimizer

from tests.unit.dense.test_foreign_optimizers import HOLDERS, RATE, Foreign, Trained, goes_on
from tests.unit.mixed_job import Job

pytestmark = pytest.mark.usefixtures("one_rank")


class Flat(Foreign):
    """A count beside torch's own keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.count += 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


class Nested(Flat):
    """torch's state dict below a key."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": Optimizer.state_dict(self), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        Optimizer.load_state_dict(self, state_dict["inner"])


@pytest.mark.parametrize("kind", [Flat, Nested])
def test_inside_torchrecs_wrapper_it_comes_back(tmp_path: Path, kind: type[Foreign]) -> None:
    goes_on(tmp_path, lambda root: Trained(root, kind, HOLDERS["in TorchRec's"]))


@pytest.mark.parametrize(
    ("kind", "holder", "told"),
    [
        (Flat, "alone", True),
        (Nested, "alone", True),
        (Flat, "in TorchRec's", False),
        (lambda p: optim.Adam(p, lr=RATE), "alone", False),
    ],
    ids=["flat", "nested", "inside", "Adam"],
)
def test_alone_it_is_told_of(
    tmp_path: Path, kind: Any, holder: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn at the start: a new process could not restore its state of a data-parallel table."""
    job = Job(tmp_path / "unused", kind)
    job.saver.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        trained = Trained(tmp_path, kind, HOLDERS[holder])
    trained.saver.close()
    found = [message for message in caplog.messages if "a new process could not restore" in message]
    assert bool(found) == told
    for message in found:
        words = ("state 'dense'", "sparse.ebc.embedding_bags.wide", "KeyedOptimizerWrapper(")
        assert all(word in message for word in words), message
