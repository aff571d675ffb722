"""Lay rows out as an inference table holds them, byte for byte as TorchRec's own quantization does.

A quantized row is scale and bias in fp16, then its codes, padded to the kernel's alignment. Rows
stored at 2 or 4 bits have the same codes, scale and bias, in another order: they are copied. All
others are decoded and encoded again, which at 8 bits is necessary, since stored rows have a scale
in fp32. The compiled operation gives the bytes of FBGEMM's, which ``quantize_inference_model``
calls, in a third of the time; rows that the operation refuses go through FBGEMM's, and all rows
where there was no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import fbgemm_gpu  # noqa: F401 - registers torch.ops.fbgemm
import numpy as np
import torch

from torchrec_checknrun.codecs import Codec, Parameters, Rowwise
from torchrec_checknrun.codecs.base import Method, require_size
from torchrec_checknrun.codecs.rowwise import decoding_factor
from torchrec_checknrun.format.row_values import EncodedRows
from torchrec_checknrun.native import has_extension

_SCALE_BYTES = 4
"""Bytes of a quantized row's scale and bias."""
_COPIED_BITS = (2, 4)
_QUANTIZED = (torch.float32, torch.float16)
"""Types of rows that FBGEMM quantizes."""
_VALUES = 32
"""Bits of a value, where rows are not encoded."""


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
        rows = rows.contiguous()
        if not self._is_native:
            return self._by_fbgemm(rows)
        laid, left = self._quantized(rows, _VALUES, 1.0, None)
        if len(left):
            laid[left] = self._by_fbgemm(rows[left])
        return laid

    def encodes(self, codec: Codec) -> bool:
        """Tell whether ``of_encoded`` takes a codec's rows."""
        return self._is_native and isinstance(codec, Rowwise)

    def of_encoded(self, rows: EncodedRows, at: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Lay out chosen rows of a chunk that is encoded otherwise, a few at a time.

        Args:
            at: ``(n,)`` int64, sorted: positions in the chunk.

        Returns:
            The rows, ``(n, stride)`` uint8, and which of them, sorted, are left to ``of_values``.

        Raises:
            ValueError: the chunk has another number of bytes.
        """
        codec = rows.codec
        assert self.encodes(codec)
        assert isinstance(codec, Rowwise)
        require_size(rows.data, rows.count * codec.row_bytes(self.dim), f"{rows.count} rows")
        laid, left = self._quantized(
            rows.data.view(rows.count, -1), codec.bits, decoding_factor(rows.parameters), at
        )
        if not len(rows.exceptions):
            return laid, left.numpy()
        exact = np.flatnonzero(np.isin(at, rows.exceptions, assume_unique=True))
        return laid, np.union1d(left.numpy(), exact)

    @property
    def _is_native(self) -> bool:
        """Return whether the compiled operation lays out such rows: quantized, in whole 16-bit
        words.
        """
        return self.bits is not None and self.dim * self.bits % 16 == 0 and has_extension()

    def _quantized(
        self, rows: torch.Tensor, bits: int, factor: float, at: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out rows by the compiled operation; also return which it refuses."""
        n = len(rows) if at is None else len(at)
        laid = torch.empty((n, self.stride), dtype=torch.uint8, device="cpu")
        refused = torch.empty(n, dtype=torch.uint8, device="cpu")
        positions = None if at is None else torch.from_numpy(np.ascontiguousarray(at))
        count = torch.ops.checknrun.serve_rows(
            rows, bits, factor, self.dim, positions, self.bits, self.scale_first, laid, refused, ""
        )
        return laid, refused.nonzero().view(-1) if count else refused[:0].long()

    def _by_fbgemm(self, rows: torch.Tensor) -> torch.Tensor:
        return self.of_stored(
            torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, self.bits)
        )

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
