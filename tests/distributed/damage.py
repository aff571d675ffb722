"""Damage the files of a checkpoint in many ways."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RANK_FILE = "rank-00001.bin"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def index_of(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the offset of a rank file's index and the chunks that the index lists."""
    data = path.read_bytes()
    offset, length, _, _ = struct.unpack("<QQ16s8s", data[-40:])
    return offset, json.loads(data[offset : offset + length])["chunks"]


def _flip_step(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    flip(manifest, manifest.read_bytes().index(b'"step"') + 8)


def _cut_manifest(checkpoint: Path) -> None:
    text = (checkpoint / MANIFEST).read_bytes()
    (checkpoint / MANIFEST).write_bytes(text[: len(text) // 2])


def _raise_format(checkpoint: Path) -> None:
    document = json.loads((checkpoint / MANIFEST).read_bytes())
    document["manifest"]["format_version"] = 999
    (checkpoint / MANIFEST).write_text(json.dumps(document))


def _flip_index(checkpoint: Path) -> None:
    rank_file = checkpoint / RANK_FILE
    flip(rank_file, index_of(rank_file)[0] + 20)


def _cut_rank_file(checkpoint: Path) -> None:
    rank_file = checkpoint / RANK_FILE
    rank_file.write_bytes(rank_file.read_bytes()[:-1])


def _lengthen_rank_file(checkpoint: Path) -> None:
    rank_file = checkpoint / RANK_FILE
    rank_file.write_bytes(rank_file.read_bytes() + b"\0")


def _flip_chunks(kind: str, which: slice) -> Callable[[Path], None]:
    def act(checkpoint: Path) -> None:
        found = chunks_of(checkpoint, kind)[which]
        assert found, f"{checkpoint} has no chunk of kind {kind}"
        for file, chunk in found:
            flip(file, chunk["offset"] + chunk["length"] // 2)

    return act


_WAYS: dict[str, Callable[[Path], object]] = {
    "manifest": _flip_step,
    "manifest_cut": _cut_manifest,
    "manifest_empty": lambda checkpoint: (checkpoint / MANIFEST).write_bytes(b""),
    "format": _raise_format,
    "uncommitted": lambda checkpoint: (checkpoint / MANIFEST).unlink(),
    "index": _flip_index,
    "truncated": _cut_rank_file,
    "longer": _lengthen_rank_file,
    "missing": lambda checkpoint: (checkpoint / RANK_FILE).unlink(),
    "gone": shutil.rmtree,
    "first_rows": _flip_chunks("rows", slice(1)),
    "last_rows": _flip_chunks("rows", slice(-1, None)),
    "every_rows": _flip_chunks("rows", slice(None)),
    "state": _flip_chunks("state", slice(-1, None)),
}


def damage(checkpoint: Path, how: str) -> None:
    """Damage a checkpoint in a way of ``_WAYS``."""
    _WAYS[how](checkpoint)


def chunks_of(checkpoint: Path, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """List a checkpoint's chunks of a kind that hold any bytes, each with its file."""
    files = sorted(checkpoint.glob("rank-*.bin"))
    found = [(file, chunk) for file in files for chunk in index_of(file)[1]]
    return [(file, chunk) for file, chunk in found if chunk["kind"] == kind and chunk["length"] > 0]
