"""A table stored by ``delta`` or ``fisher``, by NumPy and json: see format.md. It trusts bytes."""

import json

import numpy as np
from read_rows import _read_ids


def read_deltas(root, name, table, decompress):
    """All rows as fp32 at checkpoint ``name``; ``decompress``: zstd."""
    held = {}
    for rows, entry, parts in _chunks(root, name, table, decompress):
        columns, dim = tuple(entry["columns"]), np.diff(entry["columns"])[0]
        none = np.zeros(rows, "i8"), np.zeros((rows, dim), "i8"), np.zeros(rows, bool)
        _add(entry, parts, dim, held.setdefault(columns, none), decompress)
    for columns, (exponents, codes, exact) in held.items():
        held[columns] = np.ldexp(codes.astype("f8"), exponents[:, None]).astype("f4")
        held[columns].view("u4")[exact] = codes[exact]
    return np.concatenate([held[columns] for columns in sorted(held)], 1)


def _chunks(root, name, table, decompress):  # of the chain, the oldest first, for all readers
    chain = []
    while name:  # from the newest to the full one
        chain += [json.loads(bytes(np.fromfile(f"{root}/{name}/manifest.json", "u1")))["manifest"]]
        name = (chain[-1]["parent"] or {}).get("id")
    rows = chain[0]["tables"][table]["rows"]
    for manifest, file in ((m, f) for m in reversed(chain) for f in m["files"]):
        data = np.fromfile(f"{root}/{manifest['id']}/{file['name']}", "u1")
        for entry in json.loads(bytes(data[file["index_offset"] : -40]))["chunks"]:
            if entry["kind"] == "rows" and entry["table"] == table:
                yield rows, entry, _parts(entry, data[entry["offset"] :], decompress)


def _parts(entry, data, decompress):  # ids, weights and states by name
    found = {}
    sections = {"ids": entry["ids"], "weight": entry["weight"]}
    for name, about in (sections | {s["name"]: s for s in entry["optimizer"]}).items():
        part, data = np.split(data, [about["bytes"]])
        zstd = "raw" in about or "_zstd" in about.get("encoding", "")
        found[name] = np.frombuffer(decompress(bytes(part)), "u1") if zstd else part
    return found


def _add(entry, parts, dim, known, decompress):  # a chunk's rows upon what these were
    (exponents, codes, exact), ids = known, _read_ids(entry, parts["ids"])
    symbols, extra, new = _unpack(parts["weight"], entry["count"], dim, decompress)
    alone, exact[ids] = (symbols < 216) & (symbols & 7 == 7), symbols == 215
    finer = np.where(symbols >= 216, extra, symbols & 7)
    exponents[ids] = np.where(alone, extra - 149, exponents[ids] - finer)
    base = np.where(alone, 0, codes[ids].T << np.where(alone, 0, finer)).T
    codes[ids] = base + np.where(exact[ids], new.T, (new.T >> 1) ^ -(new.T & 1)).T
    exponents[ids[exact[ids]]] = 0


def _unpack(data, count, dim, decompress):  # symbols, extra bytes, and codes as stored
    data = data[1:]  # a version
    size, data = _length(data)
    symbols, data = _stream(data, size, count, decompress)
    classes = np.where(symbols >= 216, symbols - 216, symbols >> 3)
    where = (symbols >= 216) | ((symbols & 7 == 7) & (symbols != 215))
    planes = [(c, *p) for c in range(1, 27) for p in _planes(32 if c == 26 else c + 1)]
    sizes = [np.sum(where)] + [np.sum(classes == c) * -(-dim * w // 8) for c, _, _, w in planes]
    stored, streams = [], []
    for size in sizes:
        stored.append(0)
        if size:
            stored[-1], data = _length(data)
    for size, length in zip(sizes, stored, strict=True):
        stream, data = _stream(data, length, size, decompress)
        streams.append(stream)
    extra, codes = np.zeros(count, "i8"), np.zeros((count, dim), "i8")
    extra[where] = streams[0]
    for (c, low, bits, width), stream in zip(planes, streams[1:], strict=True):
        if len(stream):
            each = np.unpackbits(stream.reshape(np.sum(classes == c), -1), 1, bitorder="little")
            each = each[:, : dim * width].reshape(-1, dim, width)[:, :, :bits].astype("i8")
            codes[classes == c] |= (each << np.arange(low, low + bits)).sum(2)
    return symbols, extra, codes


def _planes(bits):  # of a class: low bit, number of bits, and bits that each takes
    while bits:
        part, bits = min(bits, 8), bits - min(bits, 8)
        yield bits, part, 8 if part > 4 else 4 if part > 2 else part


def _length(data):  # LEB128
    end = np.flatnonzero(data < 128)[0] + 1
    return sum(int(byte & 127) << 7 * i for i, byte in enumerate(data[:end])), data[end:]


def _stream(data, length, size, decompress):
    part, data = np.split(data, [length])
    return part if length == size else np.frombuffer(decompress(bytes(part)), "u1"), data
