"""Lay rows out by the compiled operation, byte for byte as FBGEMM's does, whatever they were stored
as.
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.quantized_rows import spoil
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.codecs.base import Refusal
from torchrec_checknrun.format.row_values import EncodedRows
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.serve.inference import row_form
from torchrec_checknrun.serve.inference.row_form import RowForm

pytestmark = pytest.mark.skipif(
    not has_extension(), reason="the extension was not built: there was no compiler"
)

BUILDS: list[str] = torch.ops.checknrun.kernel_builds() if has_extension() else []
WIDTHS = (8, 4, 2)


def form_of(dim: int, bits: int, scale_first: bool = True, padding: int = 0) -> RowForm:
    width = dim * bits // 8 + 4
    return RowForm(dim, bits, torch.uint8, width + padding, scale_first)


def hard_rows(seed: int, n: int, dim: int) -> torch.Tensor:
    """Draw rows of all magnitudes: constant ones, zeros of both signs, not finite ones."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((n, dim)) * 2.0 ** random.integers(-40, 20, (n, 1))
    kinds = random.integers(0, 6, n)
    rows[kinds == 1] = rows[kinds == 1, :1]
    rows[kinds == 2] = np.abs(rows[kinds == 2])
    zeros = (kinds == 3)[:, None] & (random.random((n, dim)) < 0.5)
    rows = np.where(zeros, random.choice([0.0, -0.0], (n, dim)), rows)
    rows[kinds == 4] = np.abs(np.where(random.random((n, dim)) < 0.3, 0.0, rows))[kinds == 4]
    found = torch.from_numpy(rows).float()
    for row in np.flatnonzero(random.random(n) < 0.05):
        found[row, int(random.integers(dim))] = random.choice([np.nan, np.inf, -np.inf, 1e30])
    return found


def by_fbgemm(form: RowForm, rows: torch.Tensor) -> torch.Tensor:
    with patch.object(row_form, "has_extension", lambda: False):
        return form.of_values(rows)


@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 300),
    words=st.integers(1, 40),
    padding=st.integers(0, 12),
    scale_first=st.booleans(),
    half=st.booleans(),
)
def test_values_are_laid_out_as_by_fbgemm(
    bits: int, seed: int, n: int, words: int, padding: int, scale_first: bool, half: bool
) -> None:
    form = form_of(words * 16 // bits, bits, scale_first, padding)
    rows = hard_rows(seed, n, form.dim)
    rows = rows.half() if half else rows
    assert torch.equal(form.of_values(rows), by_fbgemm(form, rows))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_build_refuses_or_gives_fbgemms_bytes(build: str, bits: int) -> None:
    form = form_of(48, bits)
    rows = hard_rows(3, 4000, form.dim)
    laid = torch.full((len(rows), form.stride), 0xA5, dtype=torch.uint8)
    refused = torch.full((len(rows),), 9, dtype=torch.uint8)
    count = torch.ops.checknrun.serve_rows(
        rows, 32, 1.0, form.dim, None, bits, True, laid, refused, build
    )
    kept = refused == Refusal.NONE
    assert count == int((~kept).sum())
    assert 0.3 < float(kept.float().mean()) < 0.9  # both kinds were there
    assert torch.equal(laid[kept], by_fbgemm(form, rows)[kept])


@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 300),
    words=st.integers(1, 20),
    stored=st.sampled_from([2, 3, 4, 8]),
    method=st.sampled_from(["asymmetric", "symmetric", "adaptive"]),
    scale=st.sampled_from([1.0, 1e-6, 1e6]),
)
def test_stored_rows_are_laid_out_as_what_they_restore_to(
    bits: int, seed: int, n: int, words: int, stored: int, method: str, scale: float
) -> None:
    """Blocks of tiny rows are scaled, exceptions are stored beside: both must come out."""
    form = form_of(words * 16 // bits, bits)
    rows = torch.randn(n, form.dim, generator=torch.Generator().manual_seed(seed)) * scale
    rows = spoil(rows, seed)
    codec = Rowwise(stored, method)
    encoded = codec.encode(rows)
    held = EncodedRows(
        codec=codec,
        parameters=encoded.parameters,
        data=encoded.data.view(-1),
        count=n,
        cols=form.dim,
        dtype=torch.float32,
        exceptions=encoded.exceptions.numpy(),
        exact=rows[encoded.exceptions],
    )
    at = np.flatnonzero(np.random.default_rng(seed).random(n) < 0.7)
    restored = torch.empty(n, form.dim)
    held.decode(0, restored)
    wanted = by_fbgemm(form, restored[torch.from_numpy(at)])
    assert form.encodes(codec)
    laid, left = form.of_encoded(held, at)
    laid[torch.from_numpy(left)] = wanted[torch.from_numpy(left)]
    assert torch.equal(laid, wanted)
    assert set(np.flatnonzero(np.isin(at, held.exceptions))) <= set(left.tolist())


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_chunk_of_another_size_is_refused(bits: int) -> None:
    form, codec = form_of(16, bits), Rowwise(8)
    held = EncodedRows(
        codec=codec,
        parameters={},
        data=torch.zeros(5 * codec.row_bytes(16) - 1, dtype=torch.uint8),
        count=5,
        cols=16,
        dtype=torch.float32,
        exceptions=np.empty(0, np.int64),
        exact=torch.empty(0, 16),
    )
    with pytest.raises(ValueError, match="take 120 bytes, not 119"):
        form.of_encoded(held, np.arange(5))


def test_wrong_arguments_are_refused() -> None:
    rows, laid = torch.zeros(5, 16), torch.zeros(5, 20, dtype=torch.uint8)
    refused = torch.zeros(5, dtype=torch.uint8)

    def call(**changes: object) -> None:
        arguments: dict[str, object] = {
            "source": rows,
            "bits": 32,
            "factor": 1.0,
            "dim": 16,
            "positions": None,
            "to_bits": 8,
            "scale_first": True,
            "out": laid,
            "refused": refused,
            "build": "",
        }
        torch.ops.checknrun.serve_rows(*(arguments | changes).values())

    call()
    for changes in (
        {"bits": 5},
        {"bits": 8},
        {"dim": 15},
        {"dim": 0},
        {"to_bits": 3},
        {"positions": torch.arange(4)},
        {"out": laid[:, :19]},
        {"out": laid[:, :19].contiguous()},
        {"refused": refused[:4]},
        {"source": rows.t()},
        {"build": "none"},
    ):
        with pytest.raises(ValueError, match=r"."):
            call(**changes)
    with pytest.raises(IndexError, match="row 5 of 5"):
        call(positions=torch.tensor([0, 1, 2, 3, 5]))
    with pytest.raises(TypeError, match="float32"):
        call(source=rows.long())
