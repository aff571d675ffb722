"""Cut tensors of any number of dimensions into boxes, and check that boxes make up a whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

Span = tuple[int, int]
"""Positions ``[start, stop)`` along one dimension."""
MOST_SPLIT = 8
"""Dimensions along which one tensor may be cut: each doubles the time of ``tiles``."""


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: one span per dimension, none for a scalar."""

    spans: tuple[Span, ...]

    @classmethod
    def at(cls, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """Make the box of a shape whose first value is at an offset."""
        return cls(tuple((at, at + size) for at, size in zip(offset, shape, strict=True)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Make the box that is all of a tensor."""
        return cls.at([0] * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.spans)

    @property
    def volume(self) -> int:
        """Return the number of values in the box."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes of one tensor; None where there is none."""
        spans = tuple(
            (max(start, first), min(stop, last))
            for (start, stop), (first, last) in zip(self.spans, other.spans, strict=True)
        )
        return Box(spans) if all(start < stop for start, stop in spans) else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Index the box in a tensor that holds ``within``."""
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(self.spans, within.spans, strict=True)
        )

    def pieces(self, most: int) -> Iterator[Box]:
        """Cut the box into pieces, each contiguous in the row-major box.

        Args:
            most: the most values of a piece.
        """
        inner = self.volume
        for k, size in enumerate(self.shape):
            if inner <= most:
                break
            inner //= size
            if inner <= most:
                yield from self._cut(k, max(1, most // inner))
                return
        yield self

    def _cut(self, dimension: int, step: int) -> Iterator[Box]:
        """Cut along one dimension in steps, and along the dimensions before it one by one."""
        steps = [1] * dimension + [step]
        ranges = [
            [(at, min(at + size, stop)) for at in range(start, stop, size)]
            for (start, stop), size in zip(self.spans, steps, strict=False)
        ]
        for spans in product(*ranges):
            yield Box((*spans, *self.spans[dimension + 1 :]))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in self.spans)}]"


def tiles(whole: Box, parts: Iterable[Box]) -> bool:
    """Tell whether parts hold every value of the whole exactly once, and nothing else."""
    held = [part for part in parts if part.volume]
    if any(len(part.spans) != len(whole.spans) for part in held):
        return False
    if sum(part.volume for part in held) != whole.volume:
        return False
    along = zip(*(part.spans for part in held), strict=True)
    if sum(len(set(spans)) > 1 for spans in along) > MOST_SPLIT:
        return False
    counts = Counter(part.spans for part in held)
    if whole.volume:
        counts[whole.spans] -= 1
    return _cancel(counts)


def _cancel(counts: Mapping[tuple[Span, ...], int]) -> bool:
    """Tell whether a sum of boxes is zero everywhere.

    The sum is zero if its changes along the first dimension are. The change at a position is the
    boxes that begin there, less the boxes that end there, without the first dimension.

    Args:
        counts: how often each box is added; a negative count subtracts it.
    """
    left = {spans: count for spans, count in counts.items() if count}
    if not left:
        return True
    if () in left:
        return False
    changes: dict[int, Counter[tuple[Span, ...]]] = {}
    for ((start, stop), *rest), count in left.items():
        changes.setdefault(start, Counter())[tuple(rest)] += count
        changes.setdefault(stop, Counter())[tuple(rest)] -= count
    return all(_cancel(change) for change in changes.values())


def overlap(parts: Iterable[tuple[Box, int]]) -> tuple[Box, int, Box, int] | None:
    """Find two parts, each with its rank, that have values in common; None if there are none."""
    held = sorted(part for part in parts if part[0].volume)
    for i, (one, rank) in enumerate(held):
        for other, other_rank in held[i + 1 :]:
            if one.spans and other.spans[0][0] >= one.spans[0][1]:
                break
            if one.intersect(other):
                return one, rank, other, other_rank
    return None
