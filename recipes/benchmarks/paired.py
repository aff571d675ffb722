"""Time calls side by side: on a shared machine only simultaneous measurements are comparable.

Every round runs each call once, in random order. A ratio is taken within each round; the result is
its median over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch

K = TypeVar("K", bound=Hashable)


def paired(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    progress: Callable[[], object] = lambda: None,
) -> dict[K, np.ndarray]:
    """Return every call's seconds in every round, ``(rounds,)``, after one untimed run of each.

    Args:
        progress: called after every round.
    """
    for call in calls.values():
        call()
    keys = list(calls)
    order = np.random.default_rng(0)
    seconds: dict[K, list[float]] = {key: [] for key in keys}
    for _ in range(rounds):
        for key in (keys[i] for i in order.permutation(len(keys))):
            _wait_for_gpu()
            started = time.perf_counter()
            calls[key]()
            _wait_for_gpu()
            seconds[key].append(time.perf_counter() - started)
        progress()
    return {key: np.array(times) for key, times in seconds.items()}


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
