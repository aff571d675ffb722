"""Rows to fused bytes and back: the compiled kernel, or what takes its place.

On the CPU the extension that ``setup.py`` builds from ``csrc``; without it (there was no compiler)
NumPy, in the same layout. On a GPU Triton, so that only the encoded bytes are copied to the
host.
"""

from __future__ import annotations

import functools
import logging
from enum import IntEnum
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

WIDTHS = (2, 3, 4, 8)


class Method(IntEnum):
    """How a row's scale and bias are found (Check-N-Run, section 4.2)."""

    ASYMMETRIC = 0
    """From its minimum to its maximum, as FBGEMM does."""
    SYMMETRIC = 1
    """From minus to plus its largest magnitude."""
    GREEDY = 2
    """The paper's search: cuts the range at either end, a bin at a time."""
    ADAPTIVE = 3
    """Ours: fits scale and bias to the codes, from several ranges."""


class Refusal(IntEnum):
    """Why a row was not encoded."""

    NONE = 0
    NOT_FINITE = 1
    TOO_LARGE = 2
    TOO_SMALL = 3


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of a fused row: codes, then scale and bias (fp32 at 8 bit, otherwise fp16)."""
    if bits == 8:
        return dim + 8
    codes = -(-dim * bits // 8) if bits == 3 else -(-dim * bits // 16) * 2
    return codes + 4


def encode_rows(
    rows: torch.Tensor,
    ids: torch.Tensor | None,
    bits: int,
    method: Method,
    num_bins: int,
    ratio: float,
    factor: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Encodes ``rows[ids]`` times ``factor`` (all rows without ids).

    Args:
        rows: ``(m, dim)`` float32, float16 or bfloat16; columns in one piece.
        ids: ``(n,)`` int64, on the rows' device.
        num_bins: GREEDY: in how many steps the range is cut.
        ratio: GREEDY: how much of the range may be cut away.
        factor: a power of two.
        out: ``(n, row_bytes)`` uint8 on the CPU.

    Returns:
        ``(n,)`` uint8 on the CPU, a ``Refusal`` per row; a refused row's bytes are zero.
    """
    refused = torch.empty(len(out), dtype=torch.uint8, device=rows.device)
    if rows.is_cuda:
        from torchrec_checknrun.codecs.triton_rows import encode_rows as encode_on_device

        encoded = torch.empty(out.shape, dtype=torch.uint8, device=rows.device)
        encode_on_device(rows, ids, bits, int(method), num_bins, ratio, factor, encoded, refused)
        out.copy_(encoded)
        return refused.cpu()
    if has_extension():
        torch.ops.checknrun.encode_rows(
            rows, ids, bits, int(method), num_bins, ratio, factor, out, refused, ""
        )
    else:
        from torchrec_checknrun.codecs.numpy_rows import encode_rows as encode_plainly

        encode_plainly(rows, ids, bits, int(method), num_bins, ratio, factor, out, refused)
    return refused


def decode_rows(
    data: torch.Tensor,
    bits: int,
    factor: float,
    out: torch.Tensor,
    ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Decodes ``(n, row_bytes)`` uint8, or its rows ``positions``, times ``factor``, into ``out``
    or into its rows ``ids``.

    Args:
        out: ``(m, dim)`` float32, float16 or bfloat16 on the CPU; columns in one piece.
    """
    if has_extension():
        torch.ops.checknrun.decode_rows(data, bits, factor, ids, out, "", positions)
    else:
        from torchrec_checknrun.codecs.numpy_rows import decode_rows as decode_plainly

        part = data if positions is None else data[positions]
        decode_plainly(part, bits, factor, ids, out)


@functools.cache
def has_extension() -> bool:
    """Whether the compiled kernel is there; says so once if it isn't."""
    for library in sorted(Path(__file__).parents[1].glob("_C*.so")):
        try:
            torch.ops.load_library(library)
        except OSError as error:
            logger.warning("%s can't be loaded: %s", library, error)
            continue
        if hasattr(torch.ops.checknrun, "stage_rows"):
            return True
        logger.warning("%s is of an earlier version of this package", library)
    logger.warning(
        "rows are quantized by NumPy, which is several times slower: install "
        "torchrec_checknrun where there is a C++ compiler (g++) to have the compiled kernel"
    )
    return False
