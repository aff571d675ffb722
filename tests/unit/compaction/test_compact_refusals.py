"""Refuse to compact damaged, replaced or incomplete chains, and commit nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.unit.chains import Part, content_of, write, write_chain
from tests.unit.compaction.compacted import (
    WHOLE,
    assert_restores_alike,
    compacted,
    flip,
    small_chain,
)
from tests.unit.entries import fields
from tests.unit.run.jobs import checkpointer, make_job, train
from torchrec_checknrun import compact
from torchrec_checknrun.compaction import compact as compaction
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root import deletion
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import Lease

pytestmark = pytest.mark.usefixtures("small_operations")


@pytest.fixture
def root(memory_root: Folder) -> Folder:
    return memory_root


def test_nothing_to_compact(root: Folder) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing to compact"):
        compact(root.url)
    first = write_chain(root, 10, [[Part(WHOLE, list(range(10)), 10)]])
    assert compact(root.url) is None
    assert committed(root) == [first]
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        compact(root.url, "nowhere")


def test_a_damaged_chunk_is_named_and_nothing_committed(root: Folder) -> None:
    head = small_chain(root)
    baseline = content_of(root, head).chunks[0]
    chunk = [c for c in baseline if fields(c)["kind"] == "rows"][-1]
    flip(root, chunk.checkpoint, chunk.file, chunk.entry.offset + 3)
    with pytest.raises(CorruptCheckpoint, match=f"{chunk.checkpoint}/{chunk.file} at offset"):
        compact(root.url, head)
    name = committed(root)[0]
    with pytest.raises(CheckpointNotFound):
        read_manifest(root, name)
    assert_restores_alike(root, resolve(root, head).head.id, head, [])
    missing = resolve(root, head).baseline.files[0].name
    filesystem, path = fsspec.core.url_to_fs(f"{root.url}/{chunk.checkpoint}/{missing}")
    filesystem.rm(path)
    with pytest.raises(ChainBroken, match=chunk.checkpoint):
        compact(root.url)


def test_storage_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Folder(tmp_path)
    head = small_chain(root)

    def full(self: Folder, name: str, data: bytes, new: bool = False) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "put", full)
        with pytest.raises(OSError, match="No space left"):
            compact(tmp_path)
    report = compacted(root)
    assert report.sequence == read_manifest(root, head).sequence
    assert_restores_alike(root, head, report.id, [Rectangle(0, 100, *WHOLE)])


@pytest.mark.usefixtures("one_rank")
def test_a_copy_counts_where_a_listing_lacks_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compact in a store whose listings lag: the copy counts as its head does."""
    job = make_job(0)
    with checkpointer(tmp_path, job) as saver:
        for _ in range(3):
            train(job, saver)
            saver.save()
            saver.wait()
    with monkeypatch.context() as patched:
        patched.setattr(compaction, "latest_claim", lambda _: None)
        report = compact(tmp_path)
    assert report is not None
    with checkpointer(tmp_path, make_job(1)) as saver:
        found = saver.restore()
    assert found is not None
    assert (found.id, found.passed_over) == (report.id, ())


def test_files_that_a_pruning_took_for_leftovers(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse to commit after a stop so long that the process's claim has expired."""
    head = small_chain(root)
    make_manifest = compaction._manifest

    def prune_first(*arguments: Any) -> Manifest:
        with monkeypatch.context() as patched:
            patched.setattr(deletion, "is_abandoned", lambda folder: True)
            assert len(prune(root, Retention(1)).leftovers) == 1
        return make_manifest(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(compaction, "_manifest", prune_first)
        with pytest.raises(CorruptCheckpoint, match="but is missing"):
            compact(root.url)
    assert committed(root)[0] == head
    assert_restores_alike(root, head, compacted(root).id, [Rectangle(0, 100, *WHOLE)])


def test_a_checkpoint_that_came_too_late(root: Folder) -> None:
    head = read_manifest(root, small_chain(root))
    lease = Lease(root)
    lease.acquire(lambda _: [manifest.id for manifest in resolve(root, head.id).manifests])
    late = write(root, 100, [Part(WHOLE, [7], 1)], head, epoch=0)
    try:
        with pytest.raises(IncompatibleCheckpoint, match="writer that had been replaced"):
            compact(root.url, late.id)
    finally:
        lease.release()


@pytest.mark.parametrize(
    ("newer", "message"),
    [
        (Part((0, 4), [1, 2], 2), r"overlapping columns \[\(0, 4\), \(0, 8\)\]"),
        (Part(WHOLE, [1, 2], 2, states=("exp_avg",)), "newer ones"),
    ],
)
def test_rows_that_are_replaced_in_part(
    root: Folder,
    newer: Part,
    message: str,
) -> None:
    head = write_chain(root, 10, [[Part(WHOLE, list(range(10)), 10)], [newer]])
    with pytest.raises(IncompatibleCheckpoint, match=message):
        compact(root.url, head)
    assert committed(root) == [p.id for p in reversed(resolve(root, head).manifests)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part(WHOLE, [0, 1, 3], 10)], "holds 3 of the 4 rows"),
        ([Part((0, 4), [0, 1, 2, 3], 10)], r"has columns \[\(0, 4\)\]"),
    ],
)
def test_a_chain_that_is_not_full(root: Folder, parts: list[Part], message: str) -> None:
    full = write(root, 4, parts)
    write(root, 4, [Part(parts[0].columns, [0], 1)], full)
    with pytest.raises(CorruptCheckpoint, match=message):
        compact(root.url)
