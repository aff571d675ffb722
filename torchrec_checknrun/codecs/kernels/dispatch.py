"""Convert rows to fused bytes and back, by the compiled kernel or a replacement.

On the CPU the extension that ``setup.py`` builds from ``csrc``; without it (no compiler was there)
NumPy, in the same layout. On a GPU Triton, so that only the encoded bytes are copied to the host.
"""

from __future__ import annotations

import torch

from torchrec_checknrun.codecs.base import Method
from torchrec_checknrun.native import has_extension


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
    """Encode ``rows[ids]`` times ``factor``; all rows without ids.

    Args:
        rows: ``(m, dim)`` float32, float16 or bfloat16; each row contiguous.
        ids: ``(n,)`` int64, on the rows' device.
        bits: 2, 3, 4 or 8.
        num_bins: GREEDY: number of steps that the range is cut into.
        ratio: GREEDY: share of the range that may be cut away.
        factor: a power of two.
        out: ``(n, row_bytes)`` uint8 on the CPU.

    Returns:
        ``(n,)`` uint8 on the CPU: a ``Refusal`` per row; the bytes of a refused row are zero.
    """
    refused = torch.empty(len(out), dtype=torch.uint8, device=rows.device)
    if rows.is_cuda:
        from torchrec_checknrun.codecs.kernels.triton_rows import encode_rows as encode_on_device

        encoded = torch.empty(out.shape, dtype=torch.uint8, device=rows.device)
        encode_on_device(rows, ids, bits, int(method), num_bins, ratio, factor, encoded, refused)
        out.copy_(encoded)
        return refused.cpu()
    if has_extension():
        torch.ops.checknrun.encode_rows(
            rows, ids, bits, int(method), num_bins, ratio, factor, out, refused, ""
        )
    else:
        from torchrec_checknrun.codecs.kernels.numpy_rows import encode_rows as encode_plainly

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
    """Decode fused rows times ``factor`` into ``out``, or into the rows ``ids`` of ``out``.

    Args:
        data: ``(n, row_bytes)`` uint8 on the CPU.
        bits: 2, 3, 4 or 8.
        factor: a power of two.
        out: ``(m, dim)`` float32, float16 or bfloat16 on the CPU; each row contiguous.
        ids: int64, one per decoded row; None: rows go to ``out`` from its first row on.
        positions: int64, the rows of ``data`` to decode; None: all.
    """
    if has_extension():
        torch.ops.checknrun.decode_rows(data, bits, factor, ids, out, "", positions)
    else:
        from torchrec_checknrun.codecs.kernels.numpy_rows import decode_rows as decode_plainly

        part = data if positions is None else data[positions]
        decode_plainly(part, bits, factor, ids, out)
