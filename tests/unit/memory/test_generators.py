"""Hold the state of generators without beginning CUDA in a process that has not used it."""

from __future__ import annotations

import pytest
import torch

from torchrec_checknrun import RngState
from torchrec_checknrun.memory.generators import generators_state


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the calls that begin CUDA, on a machine that seems to have a GPU."""
    calls: list[str] = []

    def begin() -> torch.Tensor:
        calls.append("get_rng_state")
        return torch.zeros(16, dtype=torch.uint8)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", begin)
    return calls


def test_cuda_is_not_begun(begun: list[str]) -> None:
    assert "cuda" not in generators_state()
    assert not begun


def test_a_generator_in_use_is_held(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert generators_state()["cuda"].numel() == 16


def test_a_state_that_is_asked_for_has_the_same_keys_always(begun: list[str]) -> None:
    """A restore refuses a key of the live state that the checkpoint lacks."""
    assert RngState().state.state_dict()["cuda"].numel() == 16
