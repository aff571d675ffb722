"""Compact a chain into one full checkpoint that restores the same bits and needs no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from tests.unit.chains import (
    CODECS,
    DIM,
    TABLE,
    Part,
    content_of,
    make_shards,
    new_root,
    put_manifest,
    random_parts,
    restore,
    same_bits,
    splits,
    write,
    write_chain,
)
from tests.unit.compaction.compacted import WHOLE, assert_restores_alike, compacted, small_chain
from tests.unit.entries import decode_stored, fields
from torchrec_checknrun import compact
from torchrec_checknrun.codecs import KMeans
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.restore import chunks as reading
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("small_operations")


@pytest.fixture
def root(memory_root: Folder) -> Folder:
    return memory_root


def states_of(root: Folder, name: str) -> dict[Any, Any]:
    """Return the states in the last checkpoint of a chain, by name and rank."""
    return {
        (fields(chunk)["name"], fields(chunk)["rank"]): decode_stored(
            chunk.entry, read_chunk(root, chunk)
        )
        for chunk in content_of(root, name).chunks[-1]
        if fields(chunk)["kind"] == "state"
    }


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), rows=st.integers(1, 60), ranks=st.sampled_from([1, 3]))
def test_random_chains_restore_alike(data: st.DataObject, rows: int, ranks: int) -> None:
    pytest.importorskip("kmeans1d", reason="encoding k-means codebooks needs kmeans1d")
    chain = data.draw(random_parts(rows, [*CODECS, KMeans(2), KMeans(2, block_rows=4)]))
    root = new_root()
    head = write_chain(root, rows, chain, ranks)
    report = compact(root.url)
    if len(chain) == 1:
        assert report is None
        return
    assert report is not None
    columns = [part.columns for part in chain[0]]
    ranges = data.draw(splits(rows))
    assert_restores_alike(
        root, head, report.id, [Rectangle(*of_rows, *c) for of_rows in ranges for c in columns]
    )
    new, old = read_manifest(root, report.id), read_manifest(root, head)
    assert (new.kind, new.parent, new.previous) == ("full", None, old.link)
    assert new.created_at == old.created_at
    assert (new.step, new.sequence, new.world_size) == (old.step, old.sequence, ranks)
    assert committed(root)[:2] == [new.id, old.id]
    assert new.tables[TABLE].stored_values == rows * DIM
    assert resolve(root, report.id).lossy <= resolve(root, head).lossy
    assert resolve(root, report.id).widths[TABLE] >= resolve(root, head).widths[TABLE]
    assert report.modified_fraction == 1
    assert report.total_bytes == sum(
        (root / report.id).size(name) or 0 for name in (root / report.id).names()
    )


def test_an_older_one_stays_older(root: Folder) -> None:
    """Keep the order: otherwise restores would choose the copy and abandon newer checkpoints."""
    head = read_manifest(root, small_chain(root))
    newer = write(root, 100, [Part(WHOLE, [7], 1)], head)
    report = compact(root.url, head.id)
    assert report is not None
    assert committed(root)[:3] == [newer.id, report.id, head.id]
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == newer.id
    gone = prune(root, Retention(2)).verdict.delete
    assert newer.id not in gone
    assert_restores_alike(root, head.id, report.id, [Rectangle(0, 100, *WHOLE)])


def test_it_is_the_newest_and_needs_no_other(root: Folder) -> None:
    head = small_chain(root)
    before = states_of(root, head)
    report = compacted(root)
    assert committed(root)[0] == report.id
    assert compact(root.url) is None
    shards, wanted = (make_shards(100, [Rectangle(0, 100, *WHOLE)]) for _ in range(2))
    restore(root, head, wanted)
    filesystem, path = fsspec.core.url_to_fs(root.url)
    for name in committed(root)[1:]:
        filesystem.rm(f"{path}/{name}", recursive=True)
    restore(root, report.id, shards)
    assert same_bits(shards[0].weight, wanted[0].weight)
    after = states_of(root, report.id)
    assert before.keys() == after.keys() == {("model", None), ("rng", 0), ("rng", 1)}
    assert before[("model", None)] == after[("model", None)] == {"w": 3}
    for rank in range(2):
        assert before[("rng", rank)]["drawn"].tolist() == after[("rng", rank)]["drawn"].tolist()


def test_files_are_bounded(root: Folder) -> None:
    head = small_chain(root)
    report = compacted(root, head, file_bytes=2000)
    manifest = read_manifest(root, report.id)
    longest = max(c.entry.length for c in content_of(root, report.id).chunks[0])
    assert len(manifest.files) > 2
    for file in manifest.files:
        assert file.index_offset <= 2000 + longest
    assert [file.index_offset >= 2000 for file in manifest.files[:-1]].count(False) == 0
    assert_restores_alike(root, head, report.id, [Rectangle(0, 100, *WHOLE)])


def test_progress_counts_all_bytes(root: Folder) -> None:
    head = small_chain(root)
    calls: list[tuple[int, int]] = []
    compacted(root, progress=lambda done, total: calls.append((done, total)))
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]}
    content = content_of(root, head)
    chunks = [c for part in content.chunks for c in part if fields(c)["kind"] == "rows"]
    chunks += [c for c in content.chunks[-1] if fields(c)["kind"] != "rows"]
    assert len(calls) == len(chunks)
    assert done[-1] == sum(chunk.entry.length for chunk in chunks)


def test_a_head_that_a_user_has_named(root: Folder) -> None:
    """Choose and keep the copy of a checkpoint from ``dcp.save``, and make no second one."""
    head = read_manifest(root, small_chain(root))
    weekly = replace(head, id="weekly").sealed()
    (root / weekly.id).create()
    for file in head.files:
        (root / weekly.id).put(file.name, (root / head.id).read(file.name))
    put_manifest(root, weekly)
    (root / head.id).delete(MANIFEST_NAME)
    report = compacted(root)
    assert committed(root)[:3] == [report.id, weekly.id, head.id]
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == report.id
    assert_restores_alike(root, weekly.id, report.id, [Rectangle(0, 100, *WHOLE)])
    assert compact(root.url) is None
    prune(root, Retention(1))
    assert committed(root) == [report.id]


def test_a_chain_upon_a_compacted_one(root: Folder) -> None:
    """Keep rows without optimizer state beside others, in two compactions."""
    chain = [
        [Part(WHOLE, list(range(30)), 7, states=())],
        [Part(WHOLE, list(range(3, 30, 4)), 3)],
    ]
    write_chain(root, 30, chain)
    base = read_manifest(root, compacted(root).id)
    upon = write(root, 30, [Part(WHOLE, [3, 4, 20], 2)], base)
    report = compacted(root)
    assert_restores_alike(root, upon.id, report.id, [Rectangle(0, 11, *WHOLE)])
    assert report.sequence == upon.sequence == base.sequence + 1


def test_memory_is_that_of_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, rows = Folder(tmp_path), 20_000
    chain = [
        [Part(WHOLE, list(range(rows)), 500)],
        [Part(WHOLE, list(range(0, rows, 3)), 500)],
    ]
    write_chain(root, rows, chain)
    alive: set[int] = set()
    most = 0
    read = reading.read_chunk

    class Payload(np.ndarray):
        def __del__(self) -> None:
            alive.discard(id(self))

    def counted(*arguments: Any, **options: Any) -> memoryview:
        nonlocal most
        payload = np.frombuffer(read(*arguments, **options), dtype=np.uint8).view(Payload)
        alive.add(id(payload))
        most = max(most, len(alive))
        return payload.data

    monkeypatch.setattr(reading, "read_chunk", counted)
    compacted(root)
    assert 1 <= most <= 4


@pytest.mark.slow  # cli/test_shell.py::test_looking_needs_no_torch compacts as well
def test_torchrec_is_not_needed(tmp_path: Path) -> None:
    """Compact on a machine without TorchRec."""
    small_chain(Folder(tmp_path))
    code = f"""
import sys
from torchrec_checknrun import compact
print(compact({str(tmp_path)!r}))
found = [name for name in ("torchrec", "fbgemm_gpu") if name in sys.modules]
sys.exit(f"{{found}} imported" if found else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("full checkpoint seq-000003_step-00000030_")
