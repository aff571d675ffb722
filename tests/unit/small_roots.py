"""Write checkpoints of a few bytes as a Checkpointer would."""

from __future__ import annotations

import fsspec

from torchrec_checknrun.format.manifest import Link, Manifest, RankFile, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.store.folder import Folder

FILE = RankFile("rank-00000.bin", 10, 5, 5, "0" * 16, 1)
TABLES = {"t": TableTotals(100, 8)}


def put(
    root: Folder,
    sequence: int,
    parent: Manifest | Link | None = None,
    *,
    step: int | None = None,
    name: str | None = None,
    tables: dict[str, TableTotals] | None = None,
) -> Manifest:
    """Commit a small checkpoint as a Checkpointer would."""
    step = sequence * 10 if step is None else step
    manifest = Manifest(
        id=name or checkpoint_id(sequence, step, f"{sequence:08x}"),
        sequence=sequence,
        step=step,
        kind="differential" if parent else "full",
        parent=parent.link if isinstance(parent, Manifest) else parent,
        previous=None,
        world_size=1,
        created_at="2024-02-03T04:05:06.789+00:00",
        created_by="test",
        lossy_restores=0,
        bits=None,
        tables=TABLES if tables is None else tables,
        states={},
        dense_bytes=0,
        files=(FILE,),
    ).sealed()
    folder = root / manifest.id
    folder.create()
    folder.put(FILE.name, b"0123456789")
    folder.put(MANIFEST_NAME, manifest.to_bytes())
    return manifest


def begin(root: Folder, sequence: int) -> str:
    """Write a checkpoint that is never committed: files, but no manifest."""
    name = checkpoint_id(sequence, sequence * 10, "0" * 8)
    (root / name).create()
    (root / name).put(FILE.name, b"0123456789")
    return name


def remove(folder: Folder, name: str | None = None) -> None:
    fs, path = fsspec.core.url_to_fs(folder.url)
    fs.rm(path if name is None else f"{path}/{name}", recursive=name is None)


def ids(chain: Chain | None) -> list[str]:
    assert chain is not None
    return [manifest.id for manifest in chain.manifests]
