"""Compare the GPU's kernel, run by Triton's interpreter, with the compiled kernel.

The bytes are the same; but the searches add up in another order, and may find another grid that is
as good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from tests.examples import ALL
from tests.unit.quantized_rows import METHODS, WIDTHS, random_rows, spoil
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs.base import Method
from torchrec_checknrun.codecs.kernels import dispatch as kernel

DIMS = (1, 13, 64) if ALL else (13,)


def errors(rows: torch.Tensor, encoded: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the rows' l2 errors, ``(n,)``."""
    decoded = torch.empty_like(rows)
    kernel.decode_rows(encoded, bits, 2.0, decoded)
    return (decoded.double() - rows.double()).norm(dim=1)


def differences() -> dict[str, int]:
    """Count, by case, the rows that the two kernels encode or refuse differently."""
    from torchrec_checknrun.codecs.kernels import triton_rows

    found = {}
    for dim in DIMS:
        table = spoil(random_rows(dim, 40, dim), dim)
        ids = torch.randint(0, 40, (21,), generator=torch.Generator().manual_seed(dim))
        for bits in WIDTHS:
            for method in METHODS:
                expected = torch.empty((21, row_bytes(dim, bits)), dtype=torch.uint8)
                encoded, refused = torch.empty_like(expected), torch.empty(21, dtype=torch.uint8)
                how = (bits, Method[method.upper()], 20, 0.6, 0.5)
                expected_refusals = kernel.encode_rows(table, ids, *how, expected)
                triton_rows.encode_rows(table, ids, *how, encoded, refused)
                differs = (encoded != expected).any(dim=1)
                if method in ("greedy", "adaptive"):
                    rows = table[ids]
                    error, least = (errors(rows, each, bits) for each in (encoded, expected))
                    differs &= ~(error <= 1.001 * least + 1e-5 * rows.double().norm(dim=1))
                differs |= refused != expected_refusals
                found[f"{dim} × {bits} bit, {method}"] = int(differs.sum())
    return found


def test_the_same_bytes() -> None:
    """Run in a process of its own: Triton chooses the interpreter when imported."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(DIMS) * len(WIDTHS) * len(METHODS)
    assert {case: rows for case, rows in found.items() if rows} == {}


if __name__ == "__main__":
    print(json.dumps(differences()))
