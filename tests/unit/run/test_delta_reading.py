"""Every way to read tables stored as differences adds the links up, and compares digests first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec
from tests.unit.run.deltas import TABLES, chain, live, make_job, restored, same, saving
from torchrec_checknrun import load_tables
from torchrec_checknrun.codecs.delta import Delta
from torchrec_checknrun.dcp import LoadPlanner, StorageReader
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.manifest import TableDigests
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.restore import chunks, links
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.tables import ChunkCache, TableReader

pytestmark = pytest.mark.usefixtures("one_rank", "state_scheme")


@pytest.fixture
def job(one_rank: None) -> Job:
    return make_job()


def say_another_digest(root: Path, checkpoint: str) -> None:
    """Write a head whose manifest has other digests than its rows."""
    folder = Folder(root)
    manifest = read_manifest(folder, checkpoint)
    wrong = {name: TableDigests(said.before, "0" * 16) for name, said in manifest.deltas.items()}
    data = replace(manifest, deltas=wrong).sealed().to_bytes()
    (root / checkpoint / MANIFEST_NAME).write_bytes(data)


def dcp_load(root: Path, checkpoint: str, job: Job) -> None:
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    reader = StorageReader(str(root / checkpoint))
    dcp.load(state, planner=LoadPlanner(), storage_reader=reader)


def test_through_dcp(tmp_path: Path, job: Job) -> None:
    for name, wanted in chain(tmp_path, job, 3):
        other = make_job(seed=7)
        dcp_load(tmp_path, name, other)
        with saving(tmp_path / "none", other) as saver:
            assert same(live(saver), wanted) == []


def test_through_dcp_digests_are_compared_before_a_row_is_touched(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 2)
    say_another_digest(tmp_path, made[-1][0])
    other = make_job(seed=7)
    with saving(tmp_path / "none", other) as saver:
        before = live(saver)
        with pytest.raises((CheckpointException, CorruptCheckpoint), match="digest"):
            dcp_load(tmp_path, made[-1][0], other)
        assert same(live(saver), before) == []


def fewer_rows() -> Job:
    tables = tuple(TableSpec(t.name, t.rows - 7, t.dim, t.features) for t in TABLES)
    return make_job(seed=7, spec=ModelSpec((CollectionSpec("c", tables),)))


def test_digests_are_compared_where_rows_are_dropped(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 3)
    smaller = fewer_rows()
    load_tables(tmp_path, smaller.model, ["t0", "t1"], shrink=True)
    with saving(tmp_path / "none", smaller) as saver:
        found = {name: rows for name, rows in live(saver).items() if "/" not in name}
    for name, rows in found.items():
        (whole,) = (w for n, w in made[-1][1].items() if same_table(n, name))
        assert rows.tobytes() == whole[: len(rows)].tobytes()
    say_another_digest(tmp_path, made[-1][0])
    smaller = fewer_rows()
    with pytest.raises(CorruptCheckpoint, match="digest"):
        load_tables(tmp_path, smaller.model, ["t0", "t1"], shrink=True, checkpoint=made[-1][0])


def same_table(one: str, other: str) -> bool:
    return "/" not in one and one.split("[")[0] == other.split("[")[0]


def test_digests_are_compared_by_tools_that_read_a_table_at_once(tmp_path: Path, job: Job) -> None:
    made = chain(tmp_path, job, 2)
    say_another_digest(tmp_path, made[-1][0])
    root = Folder(tmp_path)
    content = read_content(root, resolve(root, made[-1][0]))
    for table in content.chain.head.tables:
        reader = TableReader(content, table, ChunkCache(root))
        assert len(reader.window(3, 9).weight) == 6  # digests are of whole tables
        with pytest.raises(CorruptCheckpoint, match="digest"):
            reader.window(0, reader.shape.rows)


@pytest.mark.parametrize("fits", [True, False])
def test_a_restore_reads_a_chunk_once_if_it_fits(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    made = chain(tmp_path, job, 3)
    read: Counter[str] = Counter()

    def counted(root: Folder, chunk: StoredChunk, **options: Any) -> memoryview:
        read[chunk.key] += 1
        return read_chunk(root, chunk, **options)

    monkeypatch.setattr(chunks, "read_chunk", counted)
    if not fits:
        monkeypatch.setattr(links.KeptChunks, "keep", lambda *_: None)
    other = make_job(seed=7)
    with saving(tmp_path, other) as saver:
        saver.restore()
        assert same(live(saver), made[-1][1]) == []
    assert set(read.values()) == ({1} if fits else {1, 2})


def test_only_what_fits_is_kept() -> None:
    kept = links.KeptChunks(10)
    for key, size in (("a", 6), ("b", 5), ("c", 4)):
        kept.keep(key, memoryview(bytes([size] * size)))
    found = [kept.take(key) for key in "abca"]
    assert [None if each is None else bytes(each) for each in found] == [
        bytes([6] * 6),
        None,
        bytes([4] * 4),
        None,
    ]


def test_blocks_of_a_chunk_decode_its_exact_rows_once(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come a few at a time, those that are stored bit for bit as well."""
    name, wanted = chain(tmp_path, job, 1)[0]
    count, plainly = 0, Delta.verbatim_rows

    def counted(
        codec: Delta, data: torch.Tensor, rows: int, dim: int
    ) -> tuple[np.ndarray, np.ndarray]:
        nonlocal count
        count += 1
        return plainly(codec, data, rows, dim)

    monkeypatch.setattr(links, "CONVERTED_BYTES", 64)
    monkeypatch.setattr(Delta, "verbatim_rows", counted)
    assert same(restored(tmp_path, name), wanted) == []
    content = read_content(Folder(tmp_path), resolve(Folder(tmp_path), name))
    assert 0 < count <= sum(len(of_table) for of_table in content.by_table[0].values())
