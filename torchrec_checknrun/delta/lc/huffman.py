"""Code symbols by Huffman codes, which LC-Checkpoint's bucket numbers need: few, and very uneven.

Codes are canonical: their lengths are the whole table. Symbols are coded in blocks of a fixed
number, whose lengths in bits stand before the bits, so that NumPy decodes all blocks at a time.
"""

from __future__ import annotations

import heapq

import numpy as np

MOST_SYMBOLS = 16
"""Symbols of an alphabet: the longest code then has 15 bits."""
BLOCK = 4096
"""Symbols of a block; with codes of 15 bits its length fits 16 bits."""
_LONGEST = MOST_SYMBOLS - 1


def code_lengths(counts: np.ndarray) -> np.ndarray:
    """Return the bits of each symbol's code; 0 for a symbol that does not occur.

    A symbol that is alone gets one bit.
    """
    assert len(counts) <= MOST_SYMBOLS
    lengths = np.zeros(len(counts), np.uint8)
    # The second number breaks ties, so that equal counts give equal codes everywhere.
    heap = [(int(count), i, [i]) for i, count in enumerate(counts) if count]
    if len(heap) == 1:
        lengths[heap[0][2]] = 1
    heapq.heapify(heap)
    while len(heap) > 1:
        (one, order, left), (other, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (one + other, order, left + right))
    return lengths


def pack(symbols: np.ndarray, lengths: np.ndarray) -> bytes:
    """Return blocks' lengths and all codes of symbols, which all have a code."""
    codes = _codes(lengths)
    bits = lengths[symbols].astype(np.int64)
    ends = np.cumsum(bits)
    starts = ends - bits
    stream = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for at in range(int(lengths.max(initial=0))):
        long = np.flatnonzero(bits > at)
        code, length = codes[symbols[long]], bits[long]
        stream[starts[long] + at] = (code >> (length - 1 - at)) & 1
    blocks = np.add.reduceat(bits, np.arange(0, len(bits), BLOCK)) if len(bits) else bits
    return blocks.astype("<u2").tobytes() + np.packbits(stream).tobytes()


def unpack(data: bytes, count: int, lengths: np.ndarray) -> np.ndarray:
    """Decode ``count`` symbols.

    Raises:
        ValueError: ``pack`` writes no such lengths or codes for any symbols.
    """
    symbol_of, bits_of = _table(lengths)
    longest = int(lengths.max())
    blocks = -(-count // BLOCK)
    if len(data) < 2 * blocks:
        raise ValueError("the lengths of the blocks of codes are cut off")
    ends = np.cumsum(np.frombuffer(data, "<u2", blocks).astype(np.int64))
    stream = np.frombuffer(data, np.uint8, offset=2 * blocks)
    total = int(ends[-1]) if blocks else 0
    if len(stream) != -(-total // 8):
        raise ValueError(f"{total} bits of codes take other bytes than these {len(stream)}")
    if total % 8 and stream[-1] & (0xFF >> total % 8):
        raise ValueError("the bits after the last code are not zero")
    # The three bytes from a bit on hold even the longest code; the last codes look beyond the end.
    padded = np.concatenate([stream, np.zeros(3, np.uint8)]).astype(np.int32)
    windows = padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]
    position = np.concatenate([np.zeros(min(1, blocks), np.int64), ends[:-1]])
    symbols = np.zeros((blocks, BLOCK), np.uint8)
    in_last = count - (blocks - 1) * BLOCK
    for at in range(min(BLOCK, count)):
        here = position[: blocks if at < in_last else blocks - 1]
        # A wrong block may run beyond the end of all: that shows after the last symbol.
        byte = np.minimum(here >> 3, len(windows) - 1)
        code = windows[byte] >> (24 - longest - (here & 7)) & ((1 << longest) - 1)
        symbols[: len(here), at] = symbol_of[code]
        here += bits_of[code]
    if (position != ends).any():
        raise ValueError("a block of codes is longer or shorter than its length says")
    found = symbols.reshape(-1)[:count]
    if (found >= len(lengths)).any():
        raise ValueError("a code stands for no symbol")
    return found


def _codes(lengths: np.ndarray) -> np.ndarray:
    """Return each symbol's code: codes of one length follow each other in the symbols' order."""
    codes = np.zeros(len(lengths), np.int64)
    code, before = 0, 0
    for symbol in sorted(np.flatnonzero(lengths).tolist(), key=lambda s: (int(lengths[s]), s)):
        length = int(lengths[symbol])
        code <<= length - before
        codes[symbol] = code
        code, before = code + 1, length
    return codes


def _table(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the symbol, and the bits of its code, of every value of as many bits as the longest
    code has; 255 where no code begins so.

    Raises:
        ValueError: Huffman's algorithm gives no such lengths.
    """
    used = lengths[lengths > 0].astype(np.int64)
    if len(lengths) > MOST_SYMBOLS or not len(used) or used.max() > _LONGEST:
        raise ValueError(f"codes of these lengths are unknown: {lengths.tolist()}")
    longest = int(used.max())
    places = int((1 << (longest - used)).sum())
    alone = len(used) == 1 and longest == 1
    if places != 1 << longest and not alone:
        raise ValueError(f"no set of codes has these lengths: {lengths.tolist()}")
    symbol_of = np.full(1 << longest, 255, np.uint8)
    bits_of = np.ones(1 << longest, np.int64)
    for symbol, code in enumerate(_codes(lengths).tolist()):
        if length := int(lengths[symbol]):
            own = slice(code << (longest - length), (code + 1) << (longest - length))
            symbol_of[own], bits_of[own] = symbol, length
    return symbol_of, bits_of
