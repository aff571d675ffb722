"""The codec that changes nothing: the values' own bytes, little-endian, row after row."""

from __future__ import annotations

from typing import ClassVar

import torch

from torchrec_checknrun.codecs.base import (
    NO_CONTEXT,
    CodecSpec,
    Encoded,
    Parameters,
    RowContext,
    is_aligned,
    output,
    require_size,
    require_version,
    select_rows,
)


class Exact:
    """Stores rows bit for bit, in the dtype they have."""

    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 1
    lossy: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Exact:
        require_version(spec, cls.name, cls.version)
        return cls()

    @property
    def value_bits(self) -> int:
        return 32

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
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        start: int,
        out: torch.Tensor,
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

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}
