"""Store values without a grid: bit for bit (``Exact``), or cast to 16 bits (``Fp16``, ``Bf16``).

All three lay values out little-endian, row after row, and need no parameters. Hardware computes
with both 16-bit formats: a table kept in one of them is stored exactly by the codec of that name.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Parameters,
    RowContext,
    is_aligned,
    output,
    require_size,
    select_rows,
)

_BLOCK_BYTES = 1 << 19
"""Bytes of rows cast at a time: still in the processor's cache when they are read again."""


class Exact(Codec):
    """The codec that changes nothing: rows bit for bit, in their own dtype."""

    name: ClassVar[str] = "exact"
    lossy: ClassVar[bool] = False
    verbatim: ClassVar[bool] = True
    value_bits = 32

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        rows = rows.detach()
        n = len(rows) if ids is None else len(ids)
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        data = output(n * rows.shape[1] * rows.element_size(), out)
        aligned = is_aligned(data, rows.element_size())
        if ids is not None and aligned and rows.device.type == "cpu":
            torch.index_select(rows, 0, ids, out=data.view(rows.dtype).view(n, rows.shape[1]))
        else:
            taken = rows if ids is None else rows.index_select(0, ids.to(rows.device))
            data.copy_(taken.contiguous().view(-1).view(torch.uint8))
        return Encoded(data, {}, none)

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        row_bytes = out.shape[1] * out.element_size()
        require_size(data, rows * row_bytes, f"{rows} exact rows")
        part = data[start * row_bytes : (start + len(out)) * row_bytes]
        out.view(-1).view(torch.uint8).copy_(part)

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters]:
        return select_rows(data, rows, data.numel() // max(rows, 1), positions), parameters

    def family(self, parameters: Parameters, dim: int) -> str:
        return self.name

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}


class Narrow(Codec):
    """Rows cast to ``dtype``, 16 bits a value; encoding decoded rows again changes nothing.

    An element's error is at most half a unit in its last place: relative 2**-11 for fp16, 2**-8 for
    bf16. Rows that would exceed this are exceptions: rows with a NaN, an infinity, an element out
    of range (fp16: above 65504; bf16 of a table of fp16: above 65407), or elements so small that
    the row would lose more than 2**-10 (bf16: 2**-7) of its l2 norm (fp16: elements around 6e-5 and
    below). Rows that have ``dtype`` already are kept bit for bit, without exceptions.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype]
    lossy: ClassVar[bool] = True
    value_bits = 16

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        rows = rows.detach()
        if rows.device.type != "cpu":
            chosen = rows if ids is None else rows.index_select(0, ids.to(rows.device))
            narrowed = chosen.to(self.dtype)
            data = output(narrowed.numel() * 2, out)
            data.copy_(narrowed.reshape(-1).view(torch.uint8))
            return Encoded(data, {}, lost_rows(chosen, narrowed).cpu())
        n, dim = rows.shape[0] if ids is None else ids.shape[0], rows.shape[1]
        data = output(n * dim * 2, out)
        aligned = data if is_aligned(data, 2) else torch.empty_like(data)
        narrowed = aligned.view(self.dtype).view(n, dim)
        size = max(1, _BLOCK_BYTES // (dim * rows.dtype.itemsize))
        gathered = torch.empty((min(size, n), dim), dtype=rows.dtype, device="cpu")
        exceptions = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for start in range(0, n, size):
            stop = min(start + size, n)
            if ids is None:
                block = rows[start:stop]
            else:
                block = gathered[: stop - start]
                torch.index_select(rows, 0, ids[start:stop], out=block)
            narrowed[start:stop].copy_(block)
            exceptions.append(lost_rows(block, narrowed[start:stop]) + start)
        if aligned is not data:
            data.copy_(aligned)
        return Encoded(data, {}, torch.cat(exceptions))

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        dim = out.shape[1]
        require_size(data, rows * dim * 2, f"{rows} rows of {dim} values in {self.name}")
        part = data[start * dim * 2 : (start + out.shape[0]) * dim * 2]
        part = part if is_aligned(part, 2) else part.clone()
        out.copy_(part.view(self.dtype).view(out.shape))

    def row_bytes(self, dim: int) -> int:
        return 2 * dim

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}


class Fp16(Narrow):
    """IEEE half precision: the smaller error, for values up to 65504 only."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


class Bf16(Narrow):
    """The upper half of an fp32: its whole range, in steps of 1 in 128 to 1 in 256."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


def lost_rows(rows: torch.Tensor, narrowed: torch.Tensor) -> torch.Tensor:
    """Find the rows that ``narrowed`` does not hold within ``Narrow``'s error.

    Args:
        rows: ``(n, dim)`` floating point.
        narrowed: the same rows, cast to fp16 or bf16.

    Returns:
        Sorted int64 positions, on the rows' device.
    """
    if rows.numel() == 0 or rows.dtype == narrowed.dtype:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    form = torch.finfo(narrowed.dtype)
    # One fast pass for the norm decides nearly all rows: no element is larger than the norm, and
    # where the norm is at least a normal number times sqrt(dim), the loss of subnormal elements
    # is negligible.
    norm = torch.linalg.vector_norm(rows, dim=1).double()
    safe = math.sqrt(rows.shape[1]) * form.smallest_normal
    most = min(form.max, torch.finfo(rows.dtype).max * (1 - form.eps))  # rounded up, still finite
    doubtful = torch.nonzero(~((norm >= safe) & (norm <= most))).view(-1)
    if len(doubtful) == 0:
        return doubtful
    # Relative to the largest element, as squares of very small or large elements leave the range.
    exact = rows[doubtful].double()
    largest = exact.abs().amax(dim=1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    error = ((narrowed[doubtful].double() - exact) / unit).norm(dim=1)
    held = (error <= form.eps * (exact / unit).norm(dim=1)) & (largest.view(-1) <= form.max)
    held &= narrowed[doubtful].to(rows.dtype).isfinite().all(dim=1)
    return doubtful[~held]
