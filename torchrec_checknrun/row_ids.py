"""Which rows a chunk holds, in the fewest of three plain encodings.

Row ids of a chunk are sorted and distinct. A chunk of a full checkpoint holds a whole range and
needs no bytes for it; otherwise a bitmap over the chunk's span, or the distances to its first row.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from torchrec_checknrun.errors import CorruptCheckpoint

Encoding = Literal["range", "bitmap", "offsets"]
ENCODINGS: tuple[Encoding, ...] = ("range", "bitmap", "offsets")


def encode(ids: np.ndarray) -> tuple[Encoding, bytes]:
    """Encodes sorted distinct ``ids`` (int64, at least one); the first id is kept by the caller.

    Returns:
        The encoding's name and its bytes: nothing (``range``), one bit per row of the span, least
        significant bit first (``bitmap``), or uint32 little-endian distances to the first id.
    """
    first, last = int(ids[0]), int(ids[-1])
    span = last - first + 1
    if span == len(ids):
        return "range", b""
    if (span + 7) // 8 <= 4 * len(ids) or span > 2**32:
        present = np.zeros(span, dtype=np.bool_)
        present[ids - first] = True
        return "bitmap", np.packbits(present, bitorder="little").tobytes()
    return "offsets", (ids - first).astype("<u4").tobytes()


def decode(
    encoding: str, data: bytes | memoryview, first: int, last: int, count: int
) -> np.ndarray:
    """The ids again, int64, sorted.

    Raises:
        CorruptCheckpoint: the bytes don't hold ``count`` distinct sorted ids from ``first`` to
            ``last``.
    """
    span = last - first + 1
    if encoding == "range":
        offsets = np.arange(span if span == count else 0, dtype=np.int64)
    elif encoding == "bitmap" and len(data) == (span + 7) // 8:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=span)
        offsets = np.flatnonzero(bits)
    elif encoding == "offsets" and len(data) == 4 * count:
        offsets = np.frombuffer(data, "<u4").astype(np.int64)
    else:
        offsets = np.empty(0, dtype=np.int64)
    if (
        len(offsets) != count
        or count < 1
        or offsets[0] != 0
        or offsets[-1] != span - 1
        or not bool((np.diff(offsets) > 0).all())
    ):
        raise CorruptCheckpoint(
            f"row ids of a chunk ({encoding!r}, {len(data)} bytes) don't encode {count} distinct "
            f"rows from {first} to {last}"
        )
    return offsets + first
