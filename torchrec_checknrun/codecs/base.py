"""The interface that every codec has; small, so that a new codec is one file."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from torchrec_checknrun.errors import UnsupportedFormat

CodecSpec = dict[str, object]
"""What a chunk's index entry says of its codec: ``name``, ``version`` and parameters (JSON)."""


class Codec(Protocol):
    """Turns a block of rows into bytes of a fixed width per row, and back."""

    name: ClassVar[str]
    version: ClassVar[int]
    lossy: ClassVar[bool]
    """Whether decoding may differ from what was encoded."""

    @property
    def value_bits(self) -> int:
        """Bits of one stored value, without what a row adds; a measure of the codec's width."""

    def accepts(self, rows: torch.Tensor) -> bool:
        """Whether these rows ``(n, dim)`` can be encoded within the codec's error bound."""

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of one encoded row of ``dim`` values of ``dtype``."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """``(n, dim)`` floating point -> contiguous ``(n, row_bytes)`` uint8."""

    def decode(self, data: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """``(n, row_bytes)`` uint8 -> ``(n, dim)`` of ``dtype``."""

    def spec(self) -> CodecSpec:
        """What ``codec_from_spec`` needs to build this codec again."""


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
