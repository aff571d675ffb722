"""Row-wise uniform quantization in FBGEMM's fused layouts (Check-N-Run, section 4.2, asymmetric).

The bytes of a row are exactly what ``torch.ops.fbgemm`` produces, so that inference can use them as
they are: 8 bit = codes, then fp32 scale and bias; 4 and 2 bit = packed codes, then fp16 scale and
bias. FBGEMM refuses some dims and turns a row with a NaN into a row of zeros without a word; the
first is mended here by zero-padding, the second by ``accepts``: such rows are stored exactly.
"""

from __future__ import annotations

from typing import ClassVar

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch

from torchrec_checknrun.codecs.base import CodecSpec, require_version
from torchrec_checknrun.errors import UnsupportedFormat

WIDTHS = (8, 4, 2)
_FP16_MAX = 65504.0


class FusedRowwise:
    """Asymmetric min/max quantization of every row to ``bits`` in 8, 4, 2.

    Error of an element: at most half a step, ``(max - min) / (2**bits - 1) / 2``, plus the rounding
    of scale and bias (fp32 and 1e-8 at 8 bit, fp16 at 4 and 2 bit).
    """

    name: ClassVar[str] = "fbgemm_rowwise"
    version: ClassVar[int] = 1
    lossy: ClassVar[bool] = True

    def __init__(self, bits: int) -> None:
        if bits not in WIDTHS:
            raise ValueError(f"bits must be one of {WIDTHS}, not {bits!r}")
        self.bits = bits

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> FusedRowwise:
        require_version(spec, cls.name, cls.version)
        bits = spec.get("bits")
        if type(bits) is not int or bits not in WIDTHS:
            raise UnsupportedFormat(
                f"codec {cls.name!r}: bits must be one of {WIDTHS}, not {bits!r}"
            )
        return cls(bits)

    @property
    def value_bits(self) -> int:
        return self.bits

    def padded_dim(self, dim: int) -> int:
        """Columns that FBGEMM packs: the packed codes of a row must fill whole 16-bit words."""
        multiple = 1 if self.bits == 8 else 16 // self.bits
        return -(-dim // multiple) * multiple

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        tail = 8 if self.bits == 8 else 4
        return self.padded_dim(dim) * self.bits // 8 + tail

    def accepts(self, rows: torch.Tensor) -> bool:
        if rows.numel() == 0:
            return True
        # One pass: a NaN anywhere makes both extremes NaN. The limit keeps scale and bias finite.
        low, high = torch.aminmax(rows.detach())
        limit = torch.finfo(torch.float32).max / 4 if self.bits == 8 else _FP16_MAX
        return bool(torch.isfinite(high - low)) and max(abs(float(low)), abs(float(high))) <= limit

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        n, dim = rows.shape
        if n == 0:
            return torch.empty((0, self.row_bytes(dim, rows.dtype)), dtype=torch.uint8)
        values = rows.detach().to(torch.float32)
        padding = self.padded_dim(dim) - dim
        if padding:
            # Repeating a value of the row keeps its min and max; zeros would widen the range.
            values = torch.cat([values, values[:, :1].expand(n, padding)], dim=1)
        values = values.contiguous()
        if self.bits == 8:
            return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values)
        return torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values, self.bits)

    def decode(self, data: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        if data.shape[0] == 0:
            return torch.empty((0, dim), dtype=dtype)
        if self.bits == 8:
            values = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(data)
        else:
            values = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(data, self.bits)
        return values[:, :dim].to(dtype)

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version, "bits": self.bits}
