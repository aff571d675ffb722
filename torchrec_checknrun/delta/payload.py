"""Join streams of rows to one payload, each compressed where that makes it smaller, and back.

A payload is a version byte, the stored length of the symbols and these; then the stored lengths of
the other streams that aren't empty, and these streams. Lengths are LEB128. The symbols tell every
stream's size, so a stream of that many stored bytes is as it is, and a shorter one a zstd frame
that states the size. Payloads are untrusted: nothing is allocated by a size that isn't known to be
right, but for what so many stored bytes can hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
import zstandard

from torchrec_checknrun.delta.layout import SLACK

VERSION = 1
_LEVEL = 1
"""The level of zstd: higher ones make these streams no smaller."""
_MATCHING = {"min_match": 7, "hash_log": 6}
"""Limits of zstd's matching: repeated bytes are chance here, and pointing to them takes more than
coding them again. Without these limits links take up to 4 % more.
"""
_LEAST_COMPRESSED = 16
"""Bytes of a stream that can be worth a frame."""
_MOST_EXPANSION = 1 << 16
"""The largest ratio of a frame's content to its bytes: a block of 3 or 4 bytes has 128 KiB."""
_LONGEST_LENGTH = 9
"""Bytes of a length: 63 bits, seven in a byte."""
_LEAST_WINDOW = 1024
"""The least window of zstd; a frame with a wider window than its content is none of ours."""

_local = threading.local()


def join(data: np.ndarray, sizes: list[int]) -> torch.Tensor:
    """Compress streams into a payload, 1-D uint8.

    Args:
        data: the streams, one behind the other: symbols, and what these imply.
        sizes: their bytes.
    """
    view, parts, at = data.data, [], 0
    for number, size in enumerate(sizes):
        if size or number == 0:
            parts.append(_compressed(view[at : at + size]))
        at += size
    lengths = [_leb128(len(part)) for part in parts]
    pieces = [bytes([VERSION]), lengths[0], parts[0], *lengths[1:], *parts[1:]]
    return torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)


def split(
    payload: torch.Tensor, rows: int, sizes_of: Callable[[np.ndarray], list[int]]
) -> np.ndarray:
    """Return a payload's streams, one behind the other, and ``SLACK`` more bytes.

    Args:
        sizes_of: returns the bytes of all streams, given the symbols, ``(rows,)`` uint8.

    Raises:
        ValueError: no encoder writes such a payload of so many rows, or ``sizes_of`` says so.
    """
    view = payload.numpy().data
    symbols, at = _read_symbols(view, rows)
    sizes = sizes_of(symbols)
    full = [size for size in sizes[1:] if size]
    lengths = []
    for _ in full:
        length, at = _read_length(view, at)
        lengths.append(length)
    if at + sum(lengths) != len(view):
        raise ValueError(f"a payload of {len(view)} bytes, where {at + sum(lengths)} are told")
    parts = list(_cut(view, at, lengths))
    for part, size in zip(parts, full, strict=True):
        _check(part, size)
    data = np.empty(sum(sizes) + SLACK, np.uint8)
    data[:rows] = symbols
    data[len(data) - SLACK :] = 0
    at = rows
    for part, size in zip(parts, full, strict=True):
        data[at : at + size] = _expanded(part, size)
        at += size
    return data


def symbols_of(payload: torch.Tensor, rows: int) -> np.ndarray:
    """Return the rows' symbols, ``(rows,)`` uint8, unchecked.

    Raises:
        ValueError: no encoder writes such a payload of so many rows.
    """
    return _read_symbols(payload.numpy().data, rows)[0]


def _read_symbols(view: memoryview, rows: int) -> tuple[np.ndarray, int]:
    """Return the symbols, and where the next length begins."""
    if not len(view) or view[0] != VERSION:
        raise ValueError("a payload of another version")
    length, at = _read_length(view, 1)
    if length > len(view) - at:
        raise ValueError(f"a stream of {length} bytes in {len(view) - at}")
    part = view[at : at + length]
    _check(part, rows)
    return np.frombuffer(bytearray(_expanded(part, rows)), np.uint8), at + length


def _compressed(stream: memoryview) -> bytes | memoryview:
    if len(stream) < _LEAST_COMPRESSED:
        return stream
    if not hasattr(_local, "compressor"):  # making one takes as long as compressing some rows
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, **_MATCHING)
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    frame: bytes = _local.compressor.compress(stream)
    return frame if len(frame) < len(stream) else stream


def _check(part: memoryview, size: int) -> None:
    """Check that a stored stream can have so many bytes, before they are allocated."""
    if len(part) == size:
        return
    if len(part) > size or size > len(part) * _MOST_EXPANSION:
        raise ValueError(f"{len(part)} bytes can't hold a stream of {size}")
    try:
        frame = zstandard.get_frame_parameters(part)
    except zstandard.ZstdError as error:
        raise ValueError(f"a stream is no zstd frame: {error}") from error
    if frame.content_size != size or frame.window_size > max(size, _LEAST_WINDOW):
        raise ValueError(f"a frame of {frame.content_size} bytes, where {size} are due")


def _expanded(part: memoryview, size: int) -> np.ndarray:
    """Return a checked stream."""
    if len(part) == size:
        return np.frombuffer(part, np.uint8)
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        data = _local.decompressor.decompress(part, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(f"a stream can't be decompressed: {error}") from error
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes in a frame that states {size}")
    return np.frombuffer(data, np.uint8)


def _cut(view: memoryview, at: int, lengths: list[int]) -> Iterator[memoryview]:
    for length in lengths:
        yield view[at : at + length]
        at += length


def _leb128(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_length(view: memoryview, at: int) -> tuple[int, int]:
    """Return a length, and where the next one begins."""
    value = 0
    for number, octet in enumerate(view[at : at + _LONGEST_LENGTH]):
        value |= (octet & 0x7F) << 7 * number
        if octet < 0x80:
            return value, at + number + 1
    raise ValueError("a length doesn't end")
