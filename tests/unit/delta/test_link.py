"""Encoding upon references in one pass gives the bytes and references that step by step gives."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta.draw import DIMS, DTYPES, KERNELS, SEEDS, drawn_rows, drawn_steps
from tests.unit.delta.plain import same_rows
from torchrec_checknrun.delta import kernel, link
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.link import encode_upon
from torchrec_checknrun.delta.references import Undo
from torchrec_checknrun.shards import Rectangle

pytestmark = [
    pytest.mark.usefixtures("small_operations"),
    pytest.mark.skipif(KERNELS == ["numpy"], reason="the extension was not built: no compiler"),
]
BUILDS = KERNELS[1:]
ROWS, FIRST = 40, 1000


def pair(dim: int) -> tuple[GridReferences, GridReferences]:
    place = Rectangle(FIRST, FIRST + ROWS, 0, dim)
    return GridReferences("t", place), GridReferences("t", place)


def step(
    build: str, references: GridReferences, weight: torch.Tensor, at: np.ndarray, wanted: np.ndarray
) -> tuple[bytes, list[Undo]]:
    """Encode rows by one build, or step by step with NumPy's references."""
    notes: list[Undo] = []
    with (
        patch.object(link, "has_extension", lambda: bool(build)),
        patch.object(kernel, "BUILD", build),
    ):
        payload, after = encode_upon(references, at, notes.append, weight=weight, wanted=wanted)
        found = after(np.arange(len(at)))
    assert len(found) == len(at)
    return payload.numpy().tobytes(), notes


def require_same(one: GridReferences, other: GridReferences) -> None:
    everything = np.arange(ROWS)
    assert one.digest == other.digest
    assert same_rows(one.gather(everything), other.gather(everything))
    assert np.array_equal(one.digests(everything), other.digests(everything))


@settings(max_examples=examples(600, quick=60), deadline=None)
@given(SEEDS, DIMS, st.sampled_from(DTYPES), st.sampled_from(BUILDS or [""]), st.integers(1, 6))
def test_one_pass_is_step_by_step(
    seed: int, dim: int, dtype: torch.dtype, build: str, links: int
) -> None:
    """Links with narrow and wide codes, some of them undone."""
    rng, (one, other) = np.random.default_rng(seed), pair(dim)
    for _ in range(links):
        at = np.flatnonzero(rng.random(ROWS) < 0.7)
        weight, wanted = drawn_rows(rng, len(at), dim, dtype), drawn_steps(rng, len(at))
        known = one.digest
        data, undos = step(build, one, weight, at, wanted)
        wanted_data, wanted_undos = step("", other, weight, at, wanted)
        assert data == wanted_data
        require_same(one, other)
        if rng.random() < 0.4:
            for references, (put_back,) in ((one, undos), (other, wanted_undos)):
                put_back()
                references.weights_digest = known
            require_same(one, other)


@pytest.mark.parametrize("build", BUILDS)
def test_a_fault_changes_nothing(build: str) -> None:
    """The last row's place beside is none: all rows before it are put back."""
    rng, (one, other) = np.random.default_rng(3), pair(16)
    everything = np.arange(ROWS)
    exponents = np.where(everything % 3 == 0, -20, -6).astype(np.int16)
    weight = torch.from_numpy(rng.standard_normal((ROWS, 16)).astype(np.float32))
    weight[-1] = 1.0
    exponents[-1] = -12  # 16 bits a code
    for references in (one, other):
        step(build, references, weight, everything, exponents)
    slot = one._slots[-1].copy()
    one._slots[-1, :8] = 255
    with pytest.raises(ValueError, match="no predecessor"):
        step(build, one, weight * 1.1, everything, exponents)
    one._slots[-1] = slot
    require_same(one, other)


def test_positions_are_sorted_and_in_range() -> None:
    (one, _), weight, wanted = pair(4), torch.zeros(2, 4), np.zeros(2, np.int16)
    for positions in ([1, 0], [1, 1]):
        with pytest.raises(ValueError, match="sorted and distinct"):
            step(BUILDS[0], one, weight, np.array(positions), wanted)
    with pytest.raises(IndexError):
        step(BUILDS[0], one, weight, np.array([0, ROWS]), wanted)
    assert one.digest == 0
