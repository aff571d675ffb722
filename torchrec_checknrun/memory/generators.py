"""Read and set the global random number generators of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Generators(Generic[T]):
    """The generators' state in a form that is kept as long as nobody draws a number: training
    without dropout seldom does, and to convert it takes longer than to look at it.

    Args:
        convert: makes that form of what ``generators_state`` returns.
    """

    def __init__(self, convert: Callable[[dict[str, Any]], T]) -> None:
        self._convert = convert
        self._kept: tuple[object, T] | None = None

    def now(self) -> T:
        """Return the converted state as of now."""
        found = _Found.now()
        if self._kept is None or self._kept[0] != found.look:
            self._kept = found.look, self._convert(found.stored())
        return self._kept[1]


def generators_state() -> dict[str, Any]:
    """Return the state of PyTorch's generator on the CPU and on the current CUDA device, NumPy's
    legacy generator and Python's ``random``, as values that can be stored.

    A process that has not used CUDA has no generator there, and none is begun for this: that would
    take hundreds of MB of the GPU.
    """
    return _Found.now().stored()


class _Found(NamedTuple):
    """The generators' states as their libraries return them: copies."""

    python: tuple[Any, ...]
    numpy: Any
    torch: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> _Found:
        found = {"torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return cls(random.getstate(), _numpy_state(), found)

    @property
    def look(self) -> object:
        """Return what is another value wherever a state is another one."""
        numpy: object = object()  # of any other bit generator: never the same
        if isinstance(self.numpy, tuple):
            name, words, *rest = self.numpy
            numpy = name, words.tobytes(), *rest
        return self.python, numpy, [state.numpy().tobytes() for state in self.torch.values()]

    def stored(self) -> dict[str, Any]:
        version, words, gauss = self.python
        python = version, np.array(words, dtype=np.int64), gauss
        return {**self.torch, "numpy": self.numpy, "python": python}


def _numpy_state() -> Any:
    """Return the state of NumPy's generator: of the usual kind as the tuple that it was always
    stored as. To ask for that as such warns where the program has set another kind.
    """
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return found
    words, place = found["state"]["key"], found["state"]["pos"]
    return "MT19937", words, place, found["has_gauss"], found["gauss"]


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to a state that ``generators_state`` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
