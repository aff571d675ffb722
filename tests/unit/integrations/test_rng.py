"""Continue every global generator from the checkpoint's place by ``RngState``."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.crash.save_sweep import alone
from torchrec_checknrun import Checkpointer, PerRank, RngState


def drawn() -> list[float]:
    """Draw from each generator until a whole block of its numbers is used up."""
    normal = random.gauss(0, 1)  # Python's generator keeps a second value back
    numbers = [*np.random.standard_normal(701), *np.random.random(3), normal, random.random()]
    return [*map(float, numbers), *torch.randn(5).tolist(), *torch.rand(3).tolist()]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


def saver(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(root, model=nn.Linear(2, 1), state={"rng": RngState()}, **options)


def test_a_restore_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    with saver(tmp_path) as checkpointer:
        drawn()
        checkpointer.save()
        wanted = drawn()
    torch.manual_seed(77), np.random.seed(77), random.seed(77)
    with saver(tmp_path) as checkpointer:
        checkpointer.restore()
        assert drawn() == wanted


def test_is_declared_per_rank() -> None:
    assert isinstance(RngState(), PerRank)


def test_states_merged_twice_stay_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Save on 2 ranks, restore on 3, and then on 1."""
    rng = RngState()
    assert rng.merge is not None
    states = [rng.state.state_dict()]
    torch.rand(1)
    merged = rng.merge([*states, rng.state.state_dict()])
    again = rng.merge([merged, merged])
    assert again.keys() == merged.keys()
    assert again != merged
    with caplog.at_level(logging.WARNING):
        rng.state.load_state_dict(again)
    assert "seeded anew" in caplog.text
