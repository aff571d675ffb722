"""A checkpoint's table, by NumPy and json alone: see format.md. It trusts what it reads."""

import json

import numpy as np


def read_rows(root, name, table, decompress=None):
    """Row ids and fp32 weights, newest versions, at checkpoint ``name``; ``decompress``: zstd."""
    chain = []
    while name:  # from the newest to the full one
        chain += [json.loads(bytes(np.fromfile(f"{root}/{name}/manifest.json", "u1")))["manifest"]]
        name = (chain[-1]["parent"] or {}).get("id")
    size = chain[0]["tables"][table]
    weights, found = np.zeros((size["rows"], size["dim"]), "f4"), np.zeros(size["rows"], bool)
    for manifest, file in ((m, f) for m in reversed(chain) for f in m["files"]):
        data = np.fromfile(f"{root}/{manifest['id']}/{file['name']}", "u1")
        for entry in json.loads(bytes(data[file["index_offset"] : -40]))["chunks"]:
            if entry["kind"] == "rows" and entry["table"] == table:
                ids, rows = _read_chunk(entry, data[entry["offset"] :], decompress)
                weights[ids, slice(*entry["columns"])], found[ids] = rows, True
    return np.flatnonzero(found), weights[found]


def _read_chunk(entry, data, decompress):  # its row ids and weights
    weight, cols, parts = entry["weight"], np.diff(entry["columns"])[0], []
    codec, known = weight["codec"], {"exact": 1, "fp16": 1, "bf16": 1, "fbgemm_rowwise": 2}
    if codec["version"] > known.get(codec["name"], 0) or codec.get("bits", 8) not in (8, 4, 3, 2):
        raise ValueError(f"rows stored as {codec}: this reads {known}, `checknrun export` all")
    for about in (entry["ids"], weight, weight.get("exceptions", {"bytes": 0, "rows": 0})):
        part, data = np.split(data, [about["bytes"]])
        zstd = "raw" in about or "_zstd" in about.get("encoding", "")
        parts.append(np.frombuffer(decompress(part), "u1") if zstd else part)
    if codec["name"] == "fbgemm_rowwise":
        bits, coded = codec["bits"], parts[1].reshape(entry["count"], -1)
        codes, ends = np.split(coded, [-8 if bits == 8 else -4], 1)
        scale, bias = _floats(ends, "float32" if bits == 8 else "float16", 2).T[:, :, None]
        codes = np.unpackbits(codes, 1, bits * cols, "little").reshape(-1, cols, bits)
        rows = np.packbits(codes, 2, "little")[:, :, 0] * scale.astype("f8") + bias
        rows *= 2.0 ** -weight.get("parameters", {}).get("exponent", 0)
    else:
        rows = _floats(parts[1], {"exact": weight["dtype"]}.get(codec["name"], codec["name"]), cols)
    positions, exact = np.split(parts[2], [4 * about["rows"]])  # of exceptions
    rows[positions.view("<u4")] = _floats(exact, weight["dtype"], cols)
    return _read_ids(entry, parts[0]), rows


def _floats(data, dtype, cols):  # as fp32
    if dtype in ("bfloat16", "bf16"):  # an fp32's upper half
        return (data.view("<u2").astype("<u4") << 16).view("<f4").reshape(-1, cols)
    return data.view(f"<f{int(dtype[-2:]) // 8}").astype("f4").reshape(-1, cols)


def _read_ids(entry, data):  # each gap's bytes: low bits first
    if entry["ids"]["encoding"].startswith("bitmap"):
        return entry["first"] + np.flatnonzero(np.unpackbits(data, bitorder="little"))
    data = data if len(data) else np.zeros(entry["count"] - 1, "u1")  # a range: gaps of 0
    at, ends = np.arange(len(data)), np.flatnonzero(data < 128)
    shifts = 7 * (at - np.append(0, ends + 1)[np.searchsorted(ends, at)])
    return entry["first"] + np.append(0, np.cumsum(((data & 127) << shifts) + (data < 128))[ends])
