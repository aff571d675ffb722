"""Commit full checkpoints of one small table, and leave files as crashed saves do."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.unit.chains import Part, write
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.root.checkpoints import committed, has_manifest, read_manifest
from torchrec_checknrun.store.folder import Folder

ROWS = 20


def part(size: int = ROWS) -> list[Part]:
    """Return the first rows of the table, in one chunk."""
    return [Part((0, 8), list(range(size)), ROWS)]


def write_full(root: Folder, before: Manifest | None, **other: Any) -> Manifest:
    """Commit a full checkpoint right after another one."""
    made = write(root, ROWS, part(), before, **other)
    (root / made.id).delete(MANIFEST_NAME)
    full = replace(made, kind="full", parent=None).sealed()
    (root / made.id).put(MANIFEST_NAME, full.to_bytes())
    return full


def commit(root: Folder, epoch: int = 0) -> Manifest:
    """Commit a full checkpoint after all others."""
    there = [id for id in committed(root) if has_manifest(root, id)]
    before = read_manifest(root, there[0]) if there else None
    return write_full(root, before, epoch=epoch)


def leftover(root: Folder, sequence: int) -> str:
    """Leave the directory of a save that crashed half-way; return its name."""
    name = checkpoint_id(sequence, 7, "00000abc")
    (root / name).create()
    (root / name).put("rank-00000.bin", b"half")
    return name
