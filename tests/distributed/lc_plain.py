"""Follow links of LC-Checkpoint by the paper's words, and tell to the bit what they restore.

Live rows are known as of each checkpoint's begin. Its files only say which rows share a chunk, and
so buckets, and how many of these are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from tests.distributed import references
from tests.distributed.states import State
from tests.unit.delta.lc.test_buckets import plainly
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.reader import read_chunk, read_indexes
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder


@lru_cache(maxsize=200)
def restored(root: Path, copies: Path, checkpoint: str) -> tuple[State, list[str]]:
    """Return the rows of a checkpoint's tables, and a description of those that it has lost.

    Args:
        copies: a folder with the live state at every checkpoint's begin, by ``references.store``.
    """
    manifest = read_manifest(Folder(root), checkpoint)
    live = references.load(copies / f"{checkpoint}.npz")
    live = {name: live[name] for name in map(weight_of, manifest.deltas)}
    if manifest.parent is None:
        return live, []
    before, _ = restored(root, copies, manifest.parent.id)
    after, stored = follow(root, manifest, live, before)
    live_before = references.load(copies / f"{manifest.parent.id}.npz")
    lost = []
    for name, rows in live.items():
        # Since its last checkpoint a row is as it was, or as a restore has left it.
        same = _same_rows(rows, live_before[name]) | _same_rows(rows, before[name])
        missing = np.flatnonzero(~(stored[name].all(axis=1) | same))
        if len(missing):
            lost.append(f"{name}: rows {list(missing)} differ, and {checkpoint} has none of them")
    return after, lost


def follow(root: Path, manifest: Manifest, live: State, before: State) -> tuple[State, State]:
    """Add a link to what the checkpoint before it restores to.

    Returns:
        The rows that it restores to, and which values it holds.
    """
    after = {name: rows.copy() for name, rows in before.items()}
    stored = {name: np.zeros(rows.shape, bool) for name, rows in before.items()}
    for table, ids, columns in places(root, manifest):
        name, place = weight_of(table), np.ix_(ids, np.arange(*columns))
        (codec,) = manifest.tables[table].codecs
        bits = codec["bits"]
        assert isinstance(bits, int)
        after[name][place] = _link(live[name][place], before[name][place], bits)
        assert not stored[name][place].any(), f"{manifest.id} holds rows of {name} twice"
        stored[name][place] = True
    return after, stored


def _link(now: np.ndarray, known: np.ndarray, bits: int) -> np.ndarray:
    """Return what a chunk restores to: by the paper where numbers and sums are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        sound = np.isfinite(now - known)
        weight, before = (torch.from_numpy(np.where(sound, x, np.float32(0))) for x in (now, known))
        found = np.array(plainly(weight, before, bits), np.float32).reshape(now.shape)
    return np.where(sound & np.isfinite(found), found, now)


def places(root: Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray, tuple[int, int]]]:
    """Yield table, row ids and range of columns of each chunk of a checkpoint's rows."""
    folder = Folder(root)
    for chunk in read_indexes(folder, manifest):
        if isinstance(chunk.entry, RowsEntry):
            assert isinstance(chunk.header, RowsHeader)
            ids = StoredRows(chunk.header, read_chunk(folder, chunk)).ids
            yield chunk.entry.table, ids, chunk.entry.columns


def weight_of(table: str) -> str:
    """Name a table as a whole job's state does."""
    return f"model/{table}.weight"


def _same_rows(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one.view(np.int32) == other.view(np.int32)).all(axis=1)
