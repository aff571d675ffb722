"""Keep other rows from several threads at once, as a restore builds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.unit.delta.plain import same_rows
from tests.unit.delta.test_rows import random_rows, random_steps
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.lc.rows import rows_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.rows import encode
from torchrec_checknrun.shards import Rectangle

pytestmark = pytest.mark.usefixtures("small_operations", "hasty_threads")
ROWS, DIM, THREADS, ROUNDS = 240, 6, 6, 80
STATE = "momentum1"


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Have threads take turns at the interpreter as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def on_grids(rng: np.random.Generator, n: int) -> Grid:
    """Draw rows of narrow and wide codes, and some that are stored bit for bit."""
    return encode(random_rows(rng, n, DIM, torch.float32, 1.0), random_steps(rng, n))[1]


def values(rng: np.random.Generator, n: int) -> Grid:
    return rows_of(random_rows(rng, n, DIM, torch.float32, 1.0))


@pytest.mark.parametrize(
    ("kind", "draw"), [(GridReferences, on_grids), (ValueReferences, values)], ids=["delta", "lc"]
)
@pytest.mark.parametrize("knows", [False, True])
def test_threads_keep_other_rows_at_once(
    kind: type[References], draw: Callable[[np.random.Generator, int], Grid], knows: bool
) -> None:
    """The rows and digests are those of one thread after the other."""
    place = Rectangle(1000, 1000 + ROWS, 4, 4 + DIM)

    def put(references: References, number: int) -> None:
        """Replace every ``THREADS``-th row, again and again."""
        rng = np.random.default_rng(number)
        own = np.arange(number, ROWS, THREADS)
        for _ in range(ROUNDS):
            positions = own[rng.random(len(own)) < 0.7]
            before = references.gather(positions) if knows else None
            references.scatter(positions, draw(rng, len(positions)), before)
            state = references.states[STATE]
            codes = rng.integers(-400, 400, len(positions)).astype(np.int16)
            state.scatter(positions, codes, state.gather(positions))

    one, many = (kind("t", place, [STATE]) for _ in range(2))
    for number in range(THREADS):
        put(one, number)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda number: put(many, number), range(THREADS)))
    every = np.arange(ROWS)
    assert same_rows(many.gather(every), one.gather(every))
    assert np.array_equal(many.states[STATE].gather(every), one.states[STATE].gather(every))
    assert many.weights_digest == one.weights_digest != 0
    assert many.digest == one.digest
