"""Read and set the global random number generators of this process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


_has_cuda = functools.cache(torch.cuda.is_available)  # takes as long as all states of a step


@dataclass(frozen=True)
class _States:
    """The generators' states, as their libraries return them."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.cpu] if self.cuda is None else [self.cpu, self.cuda]

    @classmethod
    def now(cls) -> _States:
        cuda = torch.cuda.get_rng_state() if _has_cuda() else None
        return cls(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda)

    def is_same(self, other: _States) -> bool:
        (name, words, *rest), (other_name, other_words, *other_rest) = self.numpy, other.numpy
        return (
            self.python == other.python
            and [name, *rest] == [other_name, *other_rest]
            and np.array_equal(words, other_words)
            and all(map(torch.equal, self.tensors, other.tensors))
        )

    def stored(self) -> dict[str, Any]:
        version, words, gauss = self.python
        state = {
            "torch": self.cpu,
            "numpy": self.numpy,
            "python": (version, np.array(words, dtype=np.int64), gauss),
        }
        return state if self.cuda is None else {**state, "cuda": self.cuda}


class Generators(Generic[T]):
    """The generators' state in a form that is kept as long as nobody draws a number: training
    without dropout seldom does, and to convert it takes longer than to compare it.
    """

    def __init__(self, convert: Callable[[dict[str, Any]], T]) -> None:
        self._convert = convert
        self._kept: tuple[_States, T] | None = None

    def now(self) -> T:
        """Return the converted state."""
        states = _States.now()
        if self._kept is None or not states.is_same(self._kept[0]):
            self._kept = states, self._convert(states.stored())
        return self._kept[1]


def generators_state() -> dict[str, Any]:
    """Return the state of PyTorch's generator on the CPU and on the current CUDA device, NumPy's
    legacy generator and Python's ``random``, as values that can be stored.
    """
    return _States.now().stored()


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to a state that ``generators_state`` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
