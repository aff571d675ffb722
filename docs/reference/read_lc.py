"""A table stored by ``lc``, by NumPy and json: see format.md. It trusts bytes."""

import numpy as np
from read_deltas import _chunks
from read_rows import _floats, _read_ids


def read_lc(root, name, table, decompress):
    """All rows as fp32 at checkpoint ``name``; ``decompress``: zstd."""
    held = {}
    for rows, entry, parts in _chunks(root, name, table, decompress):
        columns, dim = tuple(entry["columns"]), np.diff(entry["columns"])[0]
        _add(entry, parts, dim, held.setdefault(columns, np.zeros((rows, dim), "f4")))
    return np.concatenate([held[columns] for columns in sorted(held)], 1)


def _add(entry, parts, dim, known):  # a chunk's rows upon what these were
    data, ids = parts["weight"], _read_ids(entry, parts["ids"])
    parameters = entry["weight"].get("parameters", {})
    if parameters.get("link"):
        known[ids] = _changed(data, known[ids].reshape(-1)).reshape(-1, dim)
    else:
        known[ids] = _floats(data, parameters.get("values", "fp32"), dim)


def _changed(data, before):  # values after the changes of a link
    kept, exceptions = int(data[1]), int(data[2:6].view("<u4")[0])
    sizes = [6, 4 * kept, kept + 1 if kept else 0, 8 * exceptions, 4 * exceptions]
    _, values, lengths, positions, exact, codes = np.split(data, np.cumsum(sizes))
    changes = np.append(np.float32(-0.0), values.view("<f4"))  # -0.0: no change of any value
    after = before + changes[_numbers(codes, lengths.tolist(), len(before))]
    after[positions.view("<u8").astype("i8")] = exact.view("<f4")
    return after


def _numbers(data, lengths, count):  # Huffman's codes, the shortest and the least symbol first
    book, code, last, at = {}, 0, 0, 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - last
        book[length, code], code, last = symbol, code + 1, length
    bits = np.unpackbits(data[2 * -(-count // 4096) :]).tolist() if book else []
    numbers = np.zeros(count, "i8")
    for i in range(count if book else 0):
        code, length = bits[at], 1
        while (length, code) not in book:
            code, length = 2 * code + bits[at + length], length + 1
        numbers[i], at = book[length, code], at + length
    return numbers
