"""Draw random Criteo data of known content, and read datasets on many ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from math import log
from typing import NamedTuple

import numpy as np

from recipes.dlrm_criteo.samples import Dataset, Samples

SIZES = [3 + 7 * f for f in range(26)]


class Row(NamedTuple):
    """A sample as Criteo logs it; None for a missing value."""

    label: int
    dense: list[int | None]
    ids: list[int | None]

    def line(self) -> bytes:
        dense = ["" if v is None else str(v) for v in self.dense]
        ids = ["" if v is None else f"{v:08x}" for v in self.ids]
        return "\t".join([str(self.label), *dense, *ids]).encode()


def random_rows(count: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)

    def maybe(value: int) -> int | None:
        return None if rng.random() < 0.2 else value

    return [
        Row(
            rng.randint(0, 1),
            [maybe(rng.randint(-3, 10 ** rng.randint(0, 9))) for _ in range(13)],
            [maybe(rng.getrandbits(32)) for _ in range(26)],
        )
        for _ in range(count)
    ]


def expected(rows: Sequence[Row], sizes: Sequence[int] = SIZES) -> Samples:
    """Convert rows as a dataset must, one value at a time."""
    dense = [[log(max(v or 0, 0) + 1) for v in row.dense] for row in rows]
    sparse = [[(v or 0) % n for v, n in zip(row.ids, sizes, strict=True)] for row in rows]
    return Samples(
        np.array(dense, np.float32).reshape(-1, 13),
        np.array(sparse, np.int64).reshape(-1, 26),
        np.array([row.label for row in rows], np.float32),
    )


def training_rows(raw: int, every: int) -> list[int]:
    return [i for i in range(raw) if not every or i % every != every - 1]


def held_out_rows(raw: int, every: int) -> list[int]:
    return [i for i in range(raw) if every and i % every == every - 1]


def global_batches(
    dataset: Dataset, position: int, global_batch: int, world_size: int, count: int | None = None
) -> list[Samples]:
    """Join the batches of all ranks; check that the ranks agree on sizes."""
    ranks = [
        list(islice(dataset.read(position, global_batch, rank, world_size), count))
        for rank in range(world_size)
    ]
    return [join(parts) for parts in zip(*ranks, strict=True)]


def join(parts: Sequence[Samples]) -> Samples:
    return Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def take(samples: Samples, rows: Sequence[int]) -> Samples:
    return Samples(*(array[list(rows)] for array in samples))


def assert_equal(actual: Samples, wanted: Samples) -> None:
    for field, a, w in zip(Samples._fields, actual, wanted, strict=True):
        assert a.dtype == w.dtype, field
        np.testing.assert_allclose(a, w, rtol=1e-6 if field == "dense" else 0, err_msg=field)


def eval_rounds(
    dataset: Dataset, limit: int, batch: int, world_size: int
) -> Iterator[list[Samples]]:
    """Yield every evaluation batch as the ranks' parts."""
    ranks = [list(dataset.read_eval(limit, batch, r, world_size)) for r in range(world_size)]
    for parts in zip(*ranks, strict=True):
        yield list(parts)
