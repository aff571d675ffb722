"""The ways to checkpoint a vector of parameters that LC-Checkpoint is compared with.

A scheme takes the parameters and what its last checkpoint restores, and returns what the new one
restores and its bytes. What makes the others smaller is given away: SCAR and TOPN pay for their
places what the best code would take, and the uniform step pays the entropy of its integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchrec_checknrun.delta import lc

Scheme = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]
_SYMBOL_BYTES = 2
"""Bytes of each distinct integer in the table of the entropy code."""


def lc_checkpoint(bits: int) -> Scheme:
    """Make LC-Checkpoint with ``2**bits - 1`` buckets, as the package stores it."""

    def save(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, float]:
        payload, after = lc.encode(torch.from_numpy(now), torch.from_numpy(before), bits)
        return after.numpy(), len(payload)

    return save


def topn(fraction: float) -> Scheme:
    """Store the values that have changed most, a fraction of all."""

    def save(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, float]:
        count = max(1, int(fraction * len(now)))
        chosen = np.argpartition(-np.abs(now - before), count - 1)[:count]
        after = before.copy()
        after[chosen] = now[chosen]
        return after, topn_bytes(len(now), count)

    return save


def topn_bytes(size: int, count: int) -> float:
    """Return the bytes of some of ``size`` values and of the best code of their places."""
    places = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return 4 * count + places / math.log(2) / 8


def topn_within(bytes_each: float, size: int) -> Scheme:
    """Make ``topn`` with as many values as so many bytes allow."""
    low, high = 1, size // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if topn_bytes(size, middle) <= bytes_each else (low, middle - 1)
    return topn((low + 0.5) / size)


def rows_of(shapes: Sequence[torch.Size]) -> np.ndarray:
    """Number the rows of all parameters, in the vector's order.

    A row is a slice across the longest dimension: SCAR then has the most choice, and few bytes
    suffice for a row. All values of a vector are one row.
    """
    numbers, rows = [], 0
    for shape in shapes:
        places = np.indices(shape)
        own = places[shape.index(max(shape))] if len(shape) > 1 else np.zeros(shape, np.int64)
        numbers.append(rows + own.reshape(-1))
        rows += int(own.max()) + 1
    return np.concatenate(numbers)


def scar_within(bytes_each: float, shapes: Sequence[torch.Size]) -> Scheme:
    """Make SCAR: the rows whose l2 distance to their last saved values is largest, whole, as many
    as so many bytes allow, but one at least.
    """
    rows = rows_of(shapes)
    sizes = np.bincount(rows)

    def save(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, float]:
        distance = np.bincount(rows, (now - before).astype(np.float64) ** 2)
        order = np.argsort(-distance)
        taken = np.cumsum(4 * sizes[order] + 4)
        count = max(1, int((taken <= bytes_each).sum()))
        chosen = np.zeros(len(sizes), bool)
        chosen[order[:count]] = True
        return np.where(chosen[rows], now, before), float(taken[count - 1])

    return save


def naive(bits: int, shapes: Sequence[torch.Size]) -> Scheme:
    """Make uniform quantization of the values themselves, with one range for each parameter."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def save(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, float]:
        parts = []
        for part in np.split(now, ends):
            least, step = part.min(), np.ptp(part) / (2**bits - 1) or np.float32(1)
            parts.append(np.rint((part - least) / step) * step + least)
        return np.concatenate(parts).astype(np.float32), len(now) * bits / 8 + 8 * len(parts)

    return save


def uniform_within(bytes_each: float) -> Scheme:
    """Make differences to the last checkpoint in whole steps, one step for all values; the
    finest that so many bytes allow.
    """

    def save(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, float]:
        change = (now - before).astype(np.float64)
        low, high = 1e-9, 4 * float(np.abs(change).max()) + 1e-12
        for _ in range(24):
            middle = math.sqrt(low * high)
            too_fine = entropy_bytes(np.rint(change / middle)) > bytes_each
            low, high = (middle, high) if too_fine else (low, middle)
        integers = np.rint(change / high)
        return (before + integers * high).astype(np.float32), entropy_bytes(integers)

    return save


def entropy_bytes(integers: np.ndarray) -> float:
    """Return the bytes of integers at their entropy, and of the table that says how often each
    occurs.
    """
    counts = np.unique(integers, return_counts=True)[1].astype(np.float64)
    bits = float((counts * np.log2(counts.sum() / counts)).sum())
    return bits / 8 + _SYMBOL_BYTES * len(counts)
