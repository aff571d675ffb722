"""Encode the row ids of a chunk, sorted and distinct, in the fewest bytes.

A chunk of a full checkpoint holds a whole range, which takes no bytes. Other chunks take the
smallest of a bitmap over their span (dense rows) and the gaps between rows (sparse rows), each
plain or compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import zstandard

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.chunk import decompress
from torchrec_checknrun.row_sets import RowSet

IdEncoding = Literal["range", "bitmap", "gaps", "bitmap_zstd", "gaps_zstd"]
ENCODINGS: tuple[IdEncoding, ...] = (
    "range",  # no bytes: all rows from first to last
    "bitmap",  # one bit per row of the span, least significant bit first
    "gaps",  # LEB128: the number of rows skipped before the second id, before the third, ...
    "bitmap_zstd",  # a zstd frame that holds a bitmap and states its size
    "gaps_zstd",
)

# Higher levels are slower and, on bits and on gaps that are nearly random, no smaller.
_ZSTD_LEVEL = 1
# A bitmap of more bytes per row (under 1 row in 128) is never written: its size would bear no
# relation to the chunk's budget. Decoding refuses it, so that a damaged span can't exhaust memory.
_BITMAP_BYTES_PER_ROW = 16
# Rows whose compressed gaps take over 6 bits each are under about 1 in 14, too sparse for a bitmap
# to be smaller: none is tried, since its size and time grow with the span.
_SPARSE_GAPS_BITS = 6
_SMALL_BYTES = 64  # trying costs nothing
_GAP_BYTES = 9  # of the longest gap: 63 bits, seven in a byte
# Bits or gaps that are unpacked at a time: temporary arrays stay in the processor's cache.
_BLOCK_BITS = 1 << 18
_BLOCK_GAPS = 1 << 16


def encode(ids: np.ndarray) -> tuple[IdEncoding, bytes]:
    """Encode sorted distinct ``ids`` (int64, at least one); the caller stores the first id.

    Returns:
        The encoding's name, see ``ENCODINGS``, and the bytes.
    """
    span = int(ids[-1]) - int(ids[0]) + 1
    if span == len(ids):
        return "range", b""
    compress = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress
    gaps = _gaps(ids)
    candidates: list[tuple[IdEncoding, bytes]] = [("gaps", gaps), ("gaps_zstd", compress(gaps))]
    least = min(len(gaps), len(candidates[1][1]))
    dense = 8 * (least - _SMALL_BYTES) <= _SPARSE_GAPS_BITS * len(ids)
    if dense and (span + 7) // 8 <= _BITMAP_BYTES_PER_ROW * len(ids):
        bitmap = _bitmap(ids, span)
        candidates += [("bitmap", bitmap), ("bitmap_zstd", compress(bitmap))]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def decode(
    encoding: str, data: bytes | memoryview, first: int, last: int, count: int
) -> np.ndarray:
    """Decode the ids, int64, sorted.

    Raises:
        CorruptCheckpoint: the bytes don't hold ``count`` distinct sorted ids from ``first`` to
            ``last``.
    """
    span = last - first + 1
    try:
        if not 1 <= count <= span or not 0 <= first <= last < 2**63:
            raise ValueError(f"{count} rows in a span of {span}")
        offsets = _offsets(encoding, data, span, count)
        if offsets[0] != 0 or offsets[-1] != span - 1:
            raise ValueError("wrong first or last row")
        # Compared, not subtracted: where a sum of gaps has wrapped around, differences do too.
        if encoding.startswith("gaps") and not bool((offsets[1:] > offsets[:-1]).all()):
            raise ValueError("not sorted, or not distinct")
    except ValueError as error:
        raise CorruptCheckpoint(
            f"row ids of a chunk ({encoding!r}, {len(data)} bytes) don't encode {count} distinct "
            f"rows from {first} to {last}: {error}"
        ) from error
    offsets += first
    return offsets


def _offsets(encoding: str, data: bytes | memoryview, span: int, count: int) -> np.ndarray:
    """Decode the distances of ``count`` ids to the first, int64; their order is not checked."""
    bitmap_bytes = (span + 7) // 8
    if encoding == "range" and len(data) == 0 and span == count:
        return np.arange(span, dtype=np.int64)
    if encoding == "bitmap" and len(data) == bitmap_bytes:
        return _offsets_of_bitmap(data, span, count)
    if encoding == "bitmap_zstd" and bitmap_bytes <= _BITMAP_BYTES_PER_ROW * count:
        bitmap = decompress(data, bitmap_bytes, bitmap_bytes, bitmap_bytes)
        return _offsets_of_bitmap(bitmap, span, count)
    if encoding == "gaps":
        return _offsets_of_gaps(data, span, count)
    if encoding == "gaps_zstd":
        most = _GAP_BYTES * (count - 1)
        gaps = decompress(data, count - 1, most, most)
        return _offsets_of_gaps(gaps, span, count)
    raise ValueError("unknown encoding or wrong size")


def _bitmap(ids: np.ndarray, span: int) -> bytes:
    bitmap = np.empty((span + 7) // 8, dtype=np.uint8)
    present = np.empty(min(_BLOCK_BITS, span), dtype=np.bool_)
    start = 0
    for low in range(0, span, _BLOCK_BITS):
        bits = present[: min(_BLOCK_BITS, span - low)]
        stop = start + int(np.searchsorted(ids[start:], int(ids[0]) + low + len(bits)))
        bits.fill(False)
        bits[ids[start:stop] - (ids[0] + low)] = True
        packed = np.packbits(bits, bitorder="little")
        bitmap[low // 8 : low // 8 + len(packed)] = packed
        start = stop
    return bitmap.tobytes()


def _offsets_of_bitmap(data: bytes | memoryview, span: int, count: int) -> np.ndarray:
    rows = RowSet.of_bits(np.frombuffer(data, np.uint8), span)
    # Counted first: as int64 the rows of a damaged bitmap could take any memory.
    held = [rows_of_span for _, _, rows_of_span in rows.spans(count)[:2]]
    if held != [count]:
        raise ValueError(f"the bitmap has {'more' if len(held) > 1 else sum(held)} rows")
    return rows.positions(0, span)


def _gaps(ids: np.ndarray) -> bytes:
    return b"".join(_leb128(np.diff(block) - 1) for block in _overlapping(ids))


def _overlapping(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of ids, each beginning with the last id of the previous block."""
    for start in range(0, len(ids) - 1, _BLOCK_GAPS):
        yield ids[start : start + _BLOCK_GAPS + 1]


def _leb128(values: np.ndarray) -> bytes:
    """Encode non-negative int64 as LEB128: seven bits a byte, low bits first, bit 7 for more."""
    if int(values.max()) < 0x80:  # the common case of dense rows
        return values.astype(np.uint8).tobytes()
    lengths = np.ones(len(values), dtype=np.uint8)
    for power in range(1, _GAP_BYTES):
        longer = values >= 1 << 7 * power
        if not longer.any():
            break
        lengths += longer
    starts = np.cumsum(lengths, dtype=np.int64)
    data = np.empty(int(starts[-1]), dtype=np.uint8)
    starts -= lengths
    data[starts] = (values & 0x7F).astype(np.uint8)
    for position in range(1, int(lengths.max())):
        rest = np.flatnonzero(lengths > position)
        lengths, starts, values = lengths[rest], starts[rest] + 1, values[rest] >> 7
        data[starts - 1] |= 0x80
        data[starts] = (values & 0x7F).astype(np.uint8)
    return data.tobytes()


def _offsets_of_gaps(data: bytes | memoryview, span: int, count: int) -> np.ndarray:
    octets = np.frombuffer(data, np.uint8)
    if len(octets) < count - 1:
        raise ValueError("fewer bytes than gaps")
    offsets = np.zeros(count, dtype=np.int64)
    gaps = offsets[1:]
    done = position = 0
    while position < len(octets):
        # Whole gaps only: a block ends after the last octet without bit 7.
        block = octets[position : position + _BLOCK_GAPS]
        ends = np.flatnonzero(block < 0x80)
        if len(ends) == 0 or done + len(ends) > count - 1:
            raise ValueError("the gaps don't end, or are too many")
        _read_leb128(block, ends, gaps[done : done + len(ends)])
        done += len(ends)
        position += int(ends[-1]) + 1
    if done != count - 1:
        raise ValueError(f"there are {done} gaps")
    if done and not 0 <= int(gaps.min()) <= int(gaps.max()) < span:
        raise ValueError("a gap is wider than the span")
    gaps += 1
    np.cumsum(gaps, out=gaps)
    return offsets


def _read_leb128(block: np.ndarray, ends: np.ndarray, out: np.ndarray) -> None:
    """Decode the numbers whose last octets are at ``ends``; the first begins the block."""
    if len(ends) == int(ends[-1]) + 1:  # one octet each
        out[:] = block[: len(ends)]
        return
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    extra = ends - starts
    if int(extra.max()) >= _GAP_BYTES:
        raise ValueError("a gap takes too many bytes")
    out[:] = block[starts] & 0x7F
    for position in range(1, int(extra.max()) + 1):
        longer = np.flatnonzero(extra >= position)
        octets = (block[starts[longer] + position] & 0x7F).astype(np.int64)
        out[longer] |= octets << 7 * position
