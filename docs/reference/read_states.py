"""Optimizer state of a table stored by ``logdelta``, by NumPy and json: see format.md. It trusts
bytes.
"""

import numpy as np
from read_deltas import _chunks, _length, _stream
from read_rows import _read_ids


def read_states(root, name, table, state, decompress):
    """The state of all rows as fp32 at checkpoint ``name``, by columns; ``decompress``: zstd."""
    held, levels = {}, _levels()
    for rows, entry, parts in _chunks(root, name, table, decompress):
        known = held.setdefault(tuple(entry["columns"]), np.zeros(rows, "i2"))
        _add(entry, _read_ids(entry, parts["ids"]), parts[state], known, decompress)
    return {
        columns: np.copysign(levels[abs(codes)], codes, dtype="f4")
        for columns, codes in held.items()
    }


def _add(entry, ids, part, known, decompress):  # a chunk's codes upon what these were
    size, part = _length(part[1:])  # behind a version
    symbols, part = _stream(part, size, entry["count"], decompress)
    symbols, sizes, words = symbols.view("i1"), [], []
    alone = symbols == -128
    for _ in range(2 * alone.any()):  # low bytes, then high ones
        size, part = _length(part)
        sizes.append(size)
    for size in sizes:
        word, part = _stream(part, size, np.sum(alone), decompress)
        words.append(word.astype("u2"))
    known[ids[~alone]] += symbols[~alone]
    if words:
        known[ids[alone]] = (words[0] | words[1] << 8).view("i2")


def _levels():  # of codes from 0 on; below 0 negative
    powers = 2.0 ** (np.arange(-149 * 8, 128 * 8) / 8)
    most = np.array([np.finfo("f4").max, np.inf, np.nan], "f4")
    return np.concatenate([[np.float32(0)], np.unique(powers.astype("f4")), most])
