"""The codec that changes nothing: the values' own bytes, little-endian, row after row."""

from __future__ import annotations

from typing import ClassVar

import torch

from torchrec_checknrun.codecs.base import CodecSpec, require_version


class Exact:
    """Stores rows bit for bit, in the dtype they have."""

    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Exact:
        require_version(spec, cls.name, cls.version)
        return cls()

    @property
    def value_bits(self) -> int:
        return 32

    def accepts(self, rows: torch.Tensor) -> bool:
        return True

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        return dim * dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.detach().reshape(-1).contiguous()
        return flat.view(torch.uint8).reshape(
            rows.shape[0], self.row_bytes(rows.shape[1], rows.dtype)
        )

    def decode(self, data: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return data.contiguous().view(dtype).reshape(data.shape[0], dim)

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}
