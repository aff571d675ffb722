"""Lay rows out as an inference table holds them, byte for byte as TorchRec's own quantization does.

A quantized row is scale and bias in fp16, then its codes, padded to the kernel's alignment. Rows
stored at 2 or 4 bits have the same codes, scale and bias, in another order: they are copied. All
others are decoded, and encoded by the operation that ``quantize_inference_model`` calls. At 8 bits
that is necessary, since stored rows have a scale in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import fbgemm_gpu  # noqa: F401 - registers torch.ops.fbgemm
import torch

from torchrec_checknrun.codecs import Codec, Parameters, Rowwise
from torchrec_checknrun.codecs.base import Method

_SCALE_BYTES = 4
"""Bytes of a quantized row's scale and bias."""
_COPIED_BITS = (2, 4)
_QUANTIZED = (torch.float32, torch.float16)
"""Types of rows that FBGEMM quantizes."""


@dataclass(frozen=True)
class RowForm:
    """The layout of an inference table's rows.

    Attributes:
        dim: values of a row.
        bits: width of a code; None: values of ``dtype``.
        width: bytes of a row without padding.
        stride: bytes from one row to the next.
        scale_first: whether scale and bias come before the codes.
    """

    dim: int
    bits: int | None
    dtype: torch.dtype
    stride: int
    scale_first: bool = True

    @property
    def width(self) -> int:
        if self.bits is None:
            return self.dim * self.dtype.itemsize
        return self.dim * self.bits // 8 + _SCALE_BYTES

    def __str__(self) -> str:
        if self.bits is None:
            return str(self.dtype).removeprefix("torch.")
        return f"int{self.bits}"

    def takes(self, codec: Codec, parameters: Parameters) -> bool:
        """Tell whether rows of a codec are TorchRec's bytes already.

        Rows of the symmetric method don't reach their range's ends: TorchRec would choose another
        scale.
        """
        return (
            isinstance(codec, Rowwise)
            and self.bits in _COPIED_BITS
            and codec.bits == self.bits
            and codec.method != Method.SYMMETRIC
            and not parameters.get("exponent", 0)
            and codec.row_bytes(self.dim) == self.width
        )

    def of_values(self, values: torch.Tensor) -> torch.Tensor:
        """Lay out rows of numbers.

        Args:
            values: ``(n, dim)`` floating point, on the CPU.

        Returns:
            ``(n, stride)`` uint8.
        """
        if self.bits is None:
            return _padded(values.to(self.dtype).contiguous().view(torch.uint8), self.stride)
        rows = values if values.dtype in _QUANTIZED else values.to(torch.float32)
        fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
            rows.contiguous(), self.bits
        )
        return self.of_stored(fused)

    def of_stored(self, fused: torch.Tensor) -> torch.Tensor:
        """Lay out rows whose scale and bias follow their codes.

        Args:
            fused: ``(n, width)`` uint8.

        Returns:
            ``(n, stride)`` uint8.
        """
        if not self.scale_first:
            return _padded(fused, self.stride)
        laid = torch.zeros((len(fused), self.stride), dtype=torch.uint8, device="cpu")
        into, source, scale, codes = laid, fused, _SCALE_BYTES, self.width - _SCALE_BYTES
        if codes % 4 == self.stride % 4 == 0:  # by words: several times faster
            into, source = laid.view(torch.int32), fused.contiguous().view(torch.int32)
            scale, codes = scale // 4, codes // 4
        into[:, :scale] = source[:, codes:]
        into[:, scale : scale + codes] = source[:, :codes]
        return laid

    def cut(self, rows: torch.Tensor, columns: tuple[int, int], stride: int) -> torch.Tensor:
        """Lay some columns of rows out as a shard of them does: with the row's scale and bias.

        Args:
            rows: ``(n, self.stride)`` uint8, laid out.
            columns: the first one and the end; they begin and end at bytes.
            stride: of the shard.

        Returns:
            ``(n, stride)`` uint8.
        """
        scale = 0 if self.bits is None else _SCALE_BYTES
        before = scale if self.scale_first else 0
        size = (self.width - scale) / self.dim
        start, stop = (before + int(column * size) for column in columns)
        codes, after = rows[:, start:stop], before + int(self.dim * size)
        other = rows[:, :before], codes, rows[:, after : self.width]
        return _padded(torch.cat(other, dim=1), stride)


def _padded(rows: torch.Tensor, stride: int) -> torch.Tensor:
    if rows.shape[1] == stride:
        return rows.contiguous()
    laid = torch.zeros((len(rows), stride), dtype=torch.uint8, device="cpu")
    laid[:, : rows.shape[1]] = rows
    return laid
