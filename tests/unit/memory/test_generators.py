"""Hold the present state of generators; do not begin CUDA in a process that has not used it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_checknrun import RngState
from torchrec_checknrun.memory.generators import Generators, generators_state, set_generators
from torchrec_checknrun.values.state import encode_state


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


def content(state: dict[str, Any]) -> tuple[object, bytes]:
    tree, payload = encode_state(state, "generators")
    return tree, b"".join(payload)


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, np.random.randn, lambda: torch.rand(1), lambda: None],
    ids=["python", "numpy", "numpy's normal", "torch", "none"],
)
def test_what_is_kept_is_the_present_state(draw: Callable[[], object]) -> None:
    """NumPy draws normal numbers in pairs, and of the second one only a flag tells."""
    held = Generators(content)
    for _ in range(4):
        assert held.now() == content(generators_state())
        assert held.now() is held.now()
        draw()


def test_a_generator_that_is_begun_later_is_held(
    begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Generators(dict)
    assert "cuda" not in held.now()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert "cuda" in held.now()


@pytest.mark.filterwarnings("error")
def test_another_bit_generator_of_numpy_is_held() -> None:
    numpy: Any = np.random  # its stubs lack what follows
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.Philox(3))
    try:
        held = Generators(dict)
        state = held.now()
        drawn = np.random.rand(3)
        assert held.now()["numpy"]["state"]["counter"].tolist() != [0, 0, 0, 0]
        set_generators(state)
        assert np.array_equal(np.random.rand(3), drawn)
    finally:
        numpy.set_bit_generator(before)
