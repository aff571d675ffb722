"""How many bits rows are stored in: the user's choice, and the codec that it means."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_checknrun.codecs import Codec, Exact, FusedRowwise
from torchrec_checknrun.codecs.rowwise import WIDTHS


@dataclass(frozen=True)
class Quantization:
    """The width of stored embedding rows. Training itself stays as it is.

    Attributes:
        bits: 8, 4 or 2: FBGEMM's fused rowwise layout. None: exact, bit for bit.

    Raises:
        ValueError: any other width.
    """

    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.bits not in WIDTHS:
            raise ValueError(f"bits must be None (exact) or one of {WIDTHS}, not {self.bits!r}")

    @property
    def codec(self) -> Codec:
        return Exact() if self.bits is None else FusedRowwise(self.bits)
