"""Files of a checkpoint, damaged in many ways."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def index_of(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Where a rank file's index is, and what it says."""
    data = path.read_bytes()
    offset, length, _, _ = struct.unpack("<QQ16s8s", data[-40:])
    return offset, json.loads(data[offset : offset + length])["chunks"]


def damage(checkpoint: Path, how: str) -> None:
    """Damage a checkpoint's manifest, rank file, directory or chunks."""
    if how.startswith("manifest") or how in ("uncommitted", "format"):
        _damage_manifest(checkpoint / "manifest.json", how)
    elif how == "gone":
        shutil.rmtree(checkpoint)
    elif how in ("first_rows", "last_rows", "every_rows", "state"):
        _damage_chunks(checkpoint, how)
    else:
        _damage_rank_file(checkpoint / "rank-00001.bin", how)


def _damage_manifest(manifest: Path, how: str) -> None:
    text = manifest.read_bytes()
    if how == "manifest":
        flip(manifest, text.index(b'"step"') + 8)
    elif how == "manifest_cut":
        manifest.write_bytes(text[: len(text) // 2])
    elif how == "manifest_empty":
        manifest.write_bytes(b"")
    elif how == "uncommitted":
        manifest.unlink()
    elif how == "format":
        document = json.loads(text)
        document["manifest"]["format_version"] = 999
        manifest.write_text(json.dumps(document))
    else:
        raise ValueError(how)


def _damage_rank_file(rank_file: Path, how: str) -> None:
    if how == "index":
        flip(rank_file, index_of(rank_file)[0] + 20)
    elif how == "truncated":
        rank_file.write_bytes(rank_file.read_bytes()[:-1])
    elif how == "missing":
        rank_file.unlink()
    elif how == "longer":
        rank_file.write_bytes(rank_file.read_bytes() + b"\0")
    else:
        raise ValueError(how)


def _damage_chunks(checkpoint: Path, how: str) -> None:
    found = chunks_of(checkpoint, "state" if how == "state" else "rows")
    if how != "every_rows":
        found = [found[0 if how == "first_rows" else -1]]
    for file, chunk in found:
        flip(file, chunk["offset"] + chunk["length"] // 2)


def chunks_of(checkpoint: Path, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    files = sorted(checkpoint.glob("rank-*.bin"))
    found = [(file, chunk) for file in files for chunk in index_of(file)[1]]
    return [(file, chunk) for file, chunk in found if chunk["kind"] == kind and chunk["length"] > 0]
