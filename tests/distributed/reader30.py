"""Which rows a checkpoint's files hold, read without a line of the package: only the format."""

import json
import struct
from pathlib import Path

import numpy as np

StoredRow = tuple[str, int]  # table, global row
StoredPart = tuple[tuple[int, int], bytes, dict[str, bytes]]  # columns, weight, optimizer states


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
            if chunk["ids"]["encoding"] == "range":
                ids = np.arange(chunk["count"])
            elif chunk["ids"]["encoding"] == "bitmap":
                ids = np.flatnonzero(
                    np.unpackbits(np.frombuffer(pieces[0], "u1"), bitorder="little")
                )
            else:
                ids = np.frombuffer(pieces[0], "<u4")
            widths = [len(piece) // chunk["count"] for piece in pieces]
            for i, row in enumerate(ids + chunk["first"]):
                values = [p[i * w : (i + 1) * w] for p, w in zip(pieces, widths, strict=True)]
                states = {s["name"]: v for s, v in zip(chunk["optimizer"], values[2:], strict=True)}
                row_key = (chunk["table"], int(row))
                found.setdefault(row_key, []).append((tuple(chunk["columns"]), values[1], states))
    return found
