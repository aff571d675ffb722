"""Read and set the global random number generators of this process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def generators_state() -> dict[str, Any]:
    """Return the state of PyTorch's generator on the CPU and on the current CUDA device, NumPy's
    legacy generator and Python's ``random``, as values that can be stored.

    A process that has not used CUDA has no generator there, and none is begun for this: that would
    take hundreds of MB of the GPU.
    """
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=True),
        "python": (version, np.array(words, dtype=np.int64), gauss),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to a state that ``generators_state`` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
