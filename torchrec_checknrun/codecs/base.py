"""The interface that every codec has; small, so that a new codec is one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Protocol

import torch

from torchrec_checknrun.errors import UnsupportedFormat

CodecSpec = dict[str, object]
"""What a chunk's index entry says of its codec: ``name``, ``version`` and parameters (JSON)."""

Parameters = dict[str, object]
"""What encoding a block of rows has found out and decoding it needs (JSON)."""


@dataclass(frozen=True)
class RowContext:
    """What a codec may look at beside the rows' values.

    Attributes:
        optimizer: the rows' optimizer state by TorchRec's names, ``(n,)`` or ``(n, dim)``.
        previous: ``(n, dim)``, the rows as the checkpoint before restores them; only for codecs
            that ask for it (``needs_base``).
    """

    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    previous: torch.Tensor | None = None


NO_CONTEXT = RowContext()


@dataclass
class Encoded:
    """A block of rows as bytes.

    Attributes:
        data: contiguous uint8, on the CPU.
        parameters: of this block; what ``decode`` needs beside the codec's own.
        exceptions: sorted int64 positions of rows that are not held within the codec's error bound
            (NaN, infinity, out of range): whoever calls stores them exactly, or they are lost.
    """

    data: torch.Tensor
    parameters: Parameters
    exceptions: torch.Tensor


class Codec(Protocol):
    """Turns a block of rows into bytes, and back."""

    name: ClassVar[str]
    version: ClassVar[int]
    lossy: ClassVar[bool]
    """Whether decoding may differ from what was encoded."""
    needs_base: ClassVar[bool]
    """Whether it encodes differences to the rows as they were restored before."""

    @property
    def value_bits(self) -> int:
        """Bits of one stored value, without what a row adds; a measure of the codec's width."""

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        """Encodes ``rows[ids]``, or all rows, in one pass.

        Args:
            rows: ``(m, dim)`` floating point, on any device.
            ids: ``(n,)`` int64; which rows, in which order.
            context: of the rows that are encoded.
            out: uint8 memory for the data, used where it is big enough.
        """

    def decode(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        start: int,
        out: torch.Tensor,
    ) -> None:
        """Decodes rows ``start`` to ``start + len(out)`` of a block.

        Args:
            data: 1-D uint8 on the CPU, what ``encode`` gave.
            rows: how many the whole block has.
            out: ``(n, dim)`` of the dtype that was encoded, on any device.

        Raises:
            ValueError: data or parameters are not of such a block.
        """

    def select(
        self,
        data: torch.Tensor,
        parameters: Parameters,
        rows: int,
        dim: int,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Parameters] | None:
        """Some rows of a block as a block of their own, which decodes to the same bits.

        Args:
            data: 1-D uint8 on the CPU, what ``encode`` gave.
            parameters: of the block.
            rows: how many it has.
            dim: their columns.
            positions: ``(n,)`` int64, sorted: which of them.

        Returns:
            The new block's data, 1-D uint8, and its parameters; None if a row can't be taken out of
            its block.

        Raises:
            ValueError: data or parameters are not of such a block.
        """

    def spec(self) -> CodecSpec:
        """What ``codec_from_spec`` needs to build this codec again."""


def output(size: int, out: torch.Tensor | None) -> torch.Tensor:
    """``size`` bytes of ``out``, or new ones."""
    if out is not None and out.numel() >= size:
        return out.view(-1)[:size]
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def is_aligned(data: torch.Tensor, size: int) -> bool:
    """Whether uint8 memory begins where a view of values of ``size`` bytes may begin."""
    return data.data_ptr() % size == 0 and data.storage_offset() % size == 0


def require_size(data: torch.Tensor, size: int, what: str) -> None:
    """Refuses data of another length.

    Raises:
        ValueError: it hasn't ``size`` bytes.
    """
    if data.numel() != size:
        raise ValueError(f"{what} take {size} bytes, not {data.numel()}")


def select_rows(
    data: torch.Tensor, rows: int, row_bytes: int, positions: torch.Tensor
) -> torch.Tensor:
    """Those rows' bytes, of data in which every row has as many.

    Raises:
        ValueError: it isn't such data.
    """
    require_size(data, rows * row_bytes, f"{rows} rows of {row_bytes} bytes")
    return data.view(rows, row_bytes).index_select(0, positions).view(-1)


def require_version(spec: CodecSpec, name: str, known: int) -> None:
    """Refuses a chunk whose codec is newer than this release.

    Raises:
        UnsupportedFormat: the stored version is not a positive integer up to ``known``.
    """
    version = spec.get("version")
    if type(version) is not int or not 1 <= version <= known:
        raise UnsupportedFormat(
            f"codec {name!r} version {version!r} is unknown (this release reads 1 to {known}): "
            "upgrade torchrec_checknrun"
        )


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
