"""Store how values have changed, in a few buckets: LC-Checkpoint (ICML 2020) as published.

The change since the *restored* predecessor, so that no error adds up, falls into buckets of one
sign and one binary exponent. The ``2**x - 1`` buckets of largest exponent are kept, each as one
value, the middle of its least and its largest; the other changes wait for a later link. Bucket
numbers are coded by Huffman's algorithm. Restoring adds one fp32 number to each value, in the
order of the links: another order, or a sum of links, would be rounded otherwise, so links are
never merged.

Payload: x and the number of buckets, a byte each; the number of exceptions, 4 bytes; the buckets'
values, fp32; the lengths of the codes, a byte each, the first of the changes that are left out;
positions (8 bytes) and values (fp32) of exceptions; the codes (``huffman.pack``). Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.delta.lc import huffman

LEAST_BITS, MOST_BITS = 1, 4
_HEAD = struct.Struct("<BBI")
_LEAST_KEY = 2 * -148
"""The ``_keys`` of fp32's least number."""
_POSITION = np.dtype("<u8")
_VALUE = np.dtype("<f4")


@dataclass(frozen=True)
class _Link:
    """The content of a payload.

    Attributes:
        values: ``(k,)`` fp32, one for each bucket, the largest exponents first.
        numbers: ``(n,)`` uint8: which bucket, counted from 1; 0: no change.
        positions, exact: of exceptions: values that are stored bit for bit.
    """

    values: np.ndarray
    numbers: np.ndarray
    positions: np.ndarray
    exact: np.ndarray

    def added_to(self, before: np.ndarray) -> np.ndarray:
        """Return the restored values; the only place that adds."""
        by_number = np.append(np.float32(-0.0), self.values)  # x + -0.0 is x, to the bit
        with np.errstate(over="ignore", invalid="ignore"):
            after = before + by_number[self.numbers]
        after[self.positions] = self.exact
        return after


def encode(
    weight: torch.Tensor, before: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the change of values since their restored predecessors.

    Values that are not finite, or whose predecessor or sum is not (in the type of the values), are
    stored bit for bit.

    Args:
        weight: the values, of fp32, bf16 or fp16.
        before: fp32 on the CPU, of the same shape: what the predecessor restores. Unchanged.
        bits: the paper's x, 1 to 4: at most ``2**bits - 1`` buckets.

    Returns:
        The payload, 1-D uint8 on the CPU; and what ``decode`` restores, fp32.

    Raises:
        ValueError: bits is out of range.
    """
    if type(bits) is not int or not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits must be {LEAST_BITS} to {MOST_BITS}, not {bits!r}")
    assert weight.shape == before.shape
    assert before.dtype == torch.float32
    with _denormals():
        return _encode(weight, before, bits)


def _encode(
    weight: torch.Tensor, before: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    now = weight.detach().to("cpu", torch.float32).reshape(-1).numpy()
    known = before.detach().reshape(-1).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        change = now - known
    sound = np.isfinite(change)
    values, numbers = _buckets(np.where(sound, change, np.float32(0)), bits)
    nowhere = np.zeros(0, np.int64)
    sums = _Link(values, numbers, nowhere, now[nowhere]).added_to(known)
    restored = torch.from_numpy(sums).to(weight.dtype)  # a narrow type may overflow
    positions = np.flatnonzero(~(sound & torch.isfinite(restored).numpy()))
    numbers[positions] = 0
    link = _Link(values, numbers, positions, now[positions])
    after = torch.from_numpy(link.added_to(known)).view(before.shape)
    data = bytearray(_pack(link, bits))
    return torch.frombuffer(data, dtype=torch.uint8), after


def decode(payload: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Restore values from a payload and their restored predecessors.

    Args:
        payload: 1-D uint8 on the CPU, as from ``encode``.
        before: fp32 on the CPU, to the bit as ``encode`` had it. Unchanged.

    Returns:
        fp32 of the same shape.

    Raises:
        ValueError: no encoder writes such a payload, or not upon these predecessors.
    """
    assert before.dtype == torch.float32
    known = before.detach().reshape(-1).numpy()
    with _denormals():
        link = _unpack(payload.numpy().tobytes(), known.size)
        after = link.added_to(known)
    unknown = ~np.isfinite(after)
    unknown[link.positions] = False
    if unknown.any():
        raise ValueError(
            f"value {int(np.argmax(unknown))} is not finite with this change: the payload belongs "
            "to other predecessors"
        )
    return torch.from_numpy(after).view(before.shape)


@contextmanager
def _denormals() -> Iterator[None]:
    """Count with denormal numbers, though this thread may take them for zero to train faster: a
    restore in another process does.
    """
    tiny = np.full(1, 2.0**-149, np.float32)
    flushed = not (tiny + tiny).any()
    if flushed:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushed:
            torch.set_flush_denormal(True)


def _buckets(change: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort finite changes into buckets; return the kept buckets' values, and all bucket numbers."""
    keys = _keys(change) - _LEAST_KEY
    found = np.flatnonzero(np.bincount(keys[change != 0]))[::-1][: 2**bits - 1]
    number_of = np.zeros(int(keys.max(initial=0)) + 1, np.uint8)
    number_of[found] = np.arange(1, len(found) + 1)
    numbers = number_of[keys]
    numbers[change == 0] = 0
    values = np.zeros(len(found), np.float32)
    for i in range(len(found)):
        own = change[numbers == i + 1]
        values[i] = (float(own.min()) + float(own.max())) / 2
    return values, numbers


def _keys(change: np.ndarray) -> np.ndarray:
    """Return a number for sign and exponent; larger exponents have larger numbers."""
    return 2 * np.frexp(change)[1].astype(np.int64) + (change < 0)


def _pack(link: _Link, bits: int) -> bytes:
    kept = len(link.values)
    head = _HEAD.pack(bits, kept, len(link.positions)) + link.values.astype(_VALUE).tobytes()
    exact = link.positions.astype(_POSITION).tobytes() + link.exact.astype(_VALUE).tobytes()
    if not kept:
        return head + exact
    lengths = huffman.code_lengths(np.bincount(link.numbers, minlength=kept + 1))
    return head + lengths.tobytes() + exact + huffman.pack(link.numbers, lengths)


def _unpack(data: bytes, count: int) -> _Link:
    """Parse a payload.

    Raises:
        ValueError: no encoder writes such a payload for as many values.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a payload of {len(data)} bytes is cut off")
    bits, kept, exceptions = _HEAD.unpack_from(data)
    if not LEAST_BITS <= bits <= MOST_BITS or kept >= 2**bits or exceptions > count:
        raise ValueError(f"no payload has {bits} bits, {kept} buckets, {exceptions} exceptions")
    codes = kept + 1 if kept else 0
    at = _HEAD.size
    parts: list[np.ndarray] = []
    for dtype, size in ((_VALUE, kept), (np.dtype("u1"), codes), (_POSITION, exceptions)):
        parts.append(_take(data, at, dtype, size))
        at += dtype.itemsize * size
    values, lengths, positions = parts
    exact = _take(data, at, _VALUE, exceptions)
    at += _VALUE.itemsize * exceptions
    _check(values, positions, count)
    if kept:
        numbers = huffman.unpack(data[at:], count, lengths)
        if (np.bincount(numbers, minlength=codes) == 0)[lengths > 0].any():
            raise ValueError("a bucket has a code and no value")
    elif len(data) > at:
        raise ValueError("codes without buckets")
    else:
        numbers = np.zeros(count, np.uint8)
    if numbers[positions.astype(np.int64)].any():
        raise ValueError("an exception is in a bucket as well")
    return _Link(values.astype(np.float32), numbers, positions.astype(np.int64), exact)


def _take(data: bytes, at: int, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if len(data) < at + dtype.itemsize * count:
        raise ValueError(f"a payload of {len(data)} bytes is cut off")
    return np.frombuffer(data, dtype, count, at)


def _check(values: np.ndarray, positions: np.ndarray, count: int) -> None:
    """Refuse buckets out of their order and exceptions that are not places of values in order."""
    if not np.isfinite(values).all() or (values == 0).any() or (np.diff(_keys(values)) >= 0).any():
        raise ValueError("the buckets' values are not finite changes of falling exponents")
    if len(positions) and (positions[-1] >= count or (positions[1:] <= positions[:-1]).any()):
        raise ValueError(f"the exceptions' positions are not {count} values' in their order")
