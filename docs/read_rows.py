"""A checkpoint's table, by NumPy and json alone: see format.md. It trusts what it reads."""

import json

import numpy as np


def read_rows(root, name, table, decompress=None):
    """Row ids and fp32 weights, newest versions, at checkpoint ``name``; ``decompress``: zstd."""
    chain = []
    while name:  # from the newest to the full one
        text = np.fromfile(f"{root}/{name}/manifest.json", "u1")
        chain.append(json.loads(text.tobytes())["manifest"])
        name = (chain[-1]["parent"] or {}).get("id")
    size = chain[0]["tables"][table]
    weights, found = np.zeros((size["rows"], size["dim"]), "f4"), np.zeros(size["rows"], bool)
    for manifest, file in ((m, f) for m in reversed(chain) for f in m["files"]):
        data = memoryview(np.fromfile(f"{root}/{manifest['id']}/{file['name']}", "u1"))
        for entry in json.loads(bytes(data[file["index_offset"] : -40]))["chunks"]:
            if entry["kind"] == "rows" and entry["table"] == table:
                ids, rows = read_chunk(entry, data[entry["offset"] :], decompress)
                weights[ids, slice(*entry["columns"])], found[ids] = rows, True
    return np.flatnonzero(found), weights[found]


def read_chunk(entry, data, decompress):
    """A chunk's row ids and weights."""
    dtypes = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
    weight, end, cols = entry["weight"], entry["ids"]["bytes"], np.diff(entry["columns"])[0]
    ids, packed = read_ids(entry, data[:end], decompress), data[end:][: weight["bytes"]]
    packed = np.frombuffer(decompress(packed) if "raw" in weight else packed, "u1")
    if weight["codec"]["name"] == "exact":
        rows = packed.view(dtypes[weight["dtype"]]).reshape(-1, cols)
    else:  # fbgemm_rowwise of 8, 4 or 2 bit
        bits, coded = weight["codec"]["bits"], packed.reshape(entry["count"], -1)
        split, form = (-8, "<f4") if bits == 8 else (-4, "<f2")
        scale, bias = np.ascontiguousarray(coded[:, split:]).view(form).astype("f4").T[:, :, None]
        codes = coded[:, :split, None] >> np.arange(0, 8, bits) & (1 << bits) - 1  # low bits first
        rows = codes.reshape(len(coded), -1)[:, :cols] * scale.astype("f8") + bias
        rows *= 2.0 ** -weight.get("parameters", {}).get("exponent", 0)
    if exact := weight.get("exceptions"):
        part = data[end + weight["bytes"] :][: exact["bytes"]]
        part = decompress(part) if "raw" in exact else part
        values = np.frombuffer(part[4 * exact["rows"] :], dtypes[weight["dtype"]])
        rows[np.frombuffer(part, "<u4", exact["rows"])] = values.reshape(-1, cols)
    return ids, rows


def read_ids(entry, data, decompress):
    """A chunk's row ids."""
    ids, gap, shift = [entry["first"]], 0, 0
    data = decompress(data) if entry["ids"]["encoding"].endswith("_zstd") else data
    if entry["ids"]["encoding"].startswith("bitmap"):
        return ids + np.flatnonzero(np.unpackbits(np.frombuffer(data, "u1"), bitorder="little"))
    for byte in data:  # gaps
        gap, shift = gap | (byte & 127) << shift, shift + 7
        if byte < 128:
            ids.append(ids[-1] + gap + 1)
            gap = shift = 0
    return np.array(ids) if data else ids + np.arange(entry["count"])  # a range has no bytes
