"""Refuse wrong arguments to the compiled delta kernel before any memory is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.delta.draw import KERNELS
from torchrec_checknrun.delta import layout
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.skipif(
    not has_extension(), reason="the extension was not built: there was no compiler"
)

N, DIM = 6, 8
KIND = torch.ones(N, dtype=torch.uint8)
EXPONENT = torch.zeros(N, dtype=torch.int16)
CODES = torch.zeros((N, DIM), dtype=torch.int32)


def encode(**changed: Any) -> tuple[torch.Tensor, list[int]]:
    arguments = {
        "weight": torch.randn(N, DIM),
        "wanted": EXPONENT,
        "before_kind": KIND,
        "before_exponent": EXPONENT,
        "before_codes": CODES,
        "kind": KIND.clone(),
        "exponent": EXPONENT.clone(),
        "codes": CODES.clone(),
        "build": "",
    } | changed
    found: tuple[torch.Tensor, list[int]] = torch.ops.checknrun.delta_encode(*arguments.values())
    return found


def apply(**changed: Any) -> None:
    data = torch.zeros(N + layout.SLACK, dtype=torch.uint8)  # rows of class 0, on the same grid
    arguments = {
        "data": data,
        "rows": N,
        "dim": DIM,
        "chosen": None,
        "first": 0,
        "before_kind": KIND,
        "before_exponent": EXPONENT,
        "before_codes": CODES,
        "kind": KIND.clone(),
        "exponent": EXPONENT.clone(),
        "codes": CODES.clone(),
        "build": "",
    } | changed
    torch.ops.checknrun.delta_apply(*arguments.values())


WRONG_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"before_kind": None}, ValueError, "a predecessor has"),
    ({"before_kind": KIND[1:]}, ValueError, "kind must be"),
    ({"before_exponent": EXPONENT.int()}, ValueError, "exponent must be"),
    ({"before_codes": CODES.long()}, ValueError, "codes must be"),
    ({"before_codes": CODES.t()}, ValueError, "codes must be"),
    ({"before_codes": CODES[:, :-1]}, ValueError, "codes must be"),
    ({"kind": KIND.to("meta")}, ValueError, "on the CPU"),
    ({"exponent": EXPONENT[:-1]}, ValueError, "exponent must be"),
    ({"codes": CODES.view(-1)}, ValueError, "two dimensions"),
    ({"build": "sse9"}, ValueError, "no build 'sse9'"),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        *WRONG_ROWS,
        ({"weight": None}, ValueError, "weights have wanted"),
        ({"wanted": None}, ValueError, "weights have wanted"),
        ({"wanted": EXPONENT.int()}, ValueError, "wanted must be"),
        ({"weight": torch.randn(N, DIM + 1)}, ValueError, "expected 6 rows"),
        ({"weight": torch.randn(DIM, N).t()}, ValueError, "each in one piece"),
        ({"weight": torch.randn(N, DIM).double()}, TypeError, "float32, float16 or bfloat16"),
        ({"weight": torch.empty((N, DIM), device="meta")}, ValueError, "on the CPU"),
        ({"codes": torch.zeros((N, 0), dtype=torch.int32)}, ValueError, "dim is 0"),
    ],
)
def test_wrong_arguments_to_encode(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    encode()
    with pytest.raises(error, match=message):
        encode(**changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        *WRONG_ROWS,
        ({"data": torch.zeros(N + layout.SLACK + 1, dtype=torch.uint8)}, ValueError, "slack"),
        ({"data": torch.zeros(N, dtype=torch.uint8)}, ValueError, "slack"),
        ({"data": torch.zeros(N + layout.SLACK)}, ValueError, "uint8"),
        ({"rows": N + 1}, ValueError, "slack"),
        ({"rows": 2**40}, ValueError, "don't hold"),
        ({"rows": -1}, ValueError, "don't hold"),
        ({"dim": 0}, ValueError, "dim is 0"),
        ({"dim": 2**40}, ValueError, "dim is"),
        ({"dim": DIM - 1}, ValueError, "columns 0 to 8 of 7"),
        ({"first": 1}, ValueError, "columns 1 to 9 of 8"),
        ({"first": -1}, ValueError, "columns -1"),
        ({"first": 2**62}, ValueError, "columns"),
        ({"chosen": torch.arange(N - 1)}, ValueError, "must be"),
        ({"chosen": torch.tensor([0, 1, 2, 4, 3, 5])}, ValueError, "sorted and distinct"),
        ({"chosen": torch.tensor([0, 1, 2, 3, 3, 5])}, ValueError, "sorted and distinct"),
        ({"chosen": torch.tensor([0, 1, 2, 3, 4, 6])}, IndexError, "row 6 of 6"),
        ({"chosen": torch.tensor([-1, 1, 2, 3, 4, 5])}, IndexError, "row -1 of 6"),
    ],
)
def test_wrong_arguments_to_apply(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    apply()
    with pytest.raises(error, match=message):
        apply(**changed)


def test_wrong_arguments_to_values() -> None:
    values = torch.ops.checknrun.delta_values
    values(KIND, EXPONENT, CODES, torch.empty(N, DIM), "")
    for out in (torch.empty(N, DIM - 1), torch.empty(DIM, N).t(), torch.empty(N, DIM).half()):
        with pytest.raises(ValueError, match="out must be"):
            values(KIND, EXPONENT, CODES, out, "")
    with pytest.raises(ValueError, match="no build"):
        values(KIND, EXPONENT, CODES, torch.empty(N, DIM), "sse9")


def test_sizes_are_the_layouts() -> None:
    symbols = np.array([*range(208), 215, *range(216, 242)], np.uint8).repeat(3)
    for dim in (1, 3, 7, 8, 64, 511):
        expected = layout.stream_sizes(symbols, dim)
        assert torch.ops.checknrun.delta_sizes(torch.from_numpy(symbols), dim) == expected


def test_the_plain_build_runs_anywhere() -> None:
    assert KERNELS[-1] == "plain"
