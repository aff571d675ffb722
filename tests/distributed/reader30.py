"""Read which rows a checkpoint's files hold from the format alone, without the package."""

import json
import struct
from pathlib import Path

import numpy as np
import zstandard

StoredRow = tuple[str, int]  # table, global row
StoredPart = tuple[tuple[int, int], bytes, dict[str, bytes]]  # columns, weight, optimizer states


def read_ids(encoding: str, data: bytes, count: int) -> np.ndarray:
    """Decode a chunk's rows, counted from its first one."""
    if encoding.endswith("_zstd"):
        data = zstandard.decompress(data)
    if encoding == "range":
        return np.arange(count)
    if encoding.startswith("bitmap"):
        return np.flatnonzero(np.unpackbits(np.frombuffer(data, "u1"), bitorder="little"))
    assert encoding.startswith("gaps"), encoding
    rows, skipped, shift = [0], 0, 0
    for octet in data:
        skipped |= (octet & 127) << shift
        shift += 7
        if octet < 128:
            rows.append(rows[-1] + 1 + skipped)
            skipped = shift = 0
    return np.array(rows)


def read_rows(checkpoint: str | Path) -> dict[StoredRow, list[StoredPart]]:
    found: dict[StoredRow, list[StoredPart]] = {}
    manifest = json.loads((Path(checkpoint) / "manifest.json").read_bytes())["manifest"]
    for file in manifest["files"]:
        data = (Path(checkpoint) / file["name"]).read_bytes()
        offset, length, _, magic = struct.unpack("<QQ16s8s", data[-40:])
        assert magic == b"CHKNRUN1"
        for chunk in json.loads(data[offset : offset + length])["chunks"]:
            if chunk["kind"] != "rows":
                continue
            pieces, at = [], chunk["offset"]
            for part in (chunk["ids"], chunk["weight"], *chunk["optimizer"]):
                pieces.append(data[at : at + part["bytes"]])
                at += part["bytes"]
            assert at == chunk["offset"] + chunk["length"]
            ids = chunk["first"] + read_ids(chunk["ids"]["encoding"], pieces[0], chunk["count"])
            assert (len(ids), ids[-1]) == (chunk["count"], chunk["last"])
            widths = [len(piece) // chunk["count"] for piece in pieces]
            for i, row in enumerate(ids):
                values = [p[i * w : (i + 1) * w] for p, w in zip(pieces, widths, strict=True)]
                states = {s["name"]: v for s, v in zip(chunk["optimizer"], values[2:], strict=True)}
                row_key = (chunk["table"], int(row))
                found.setdefault(row_key, []).append((tuple(chunk["columns"]), values[1], states))
    return found
