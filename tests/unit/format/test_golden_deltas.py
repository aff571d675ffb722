"""Restore checkpoints of format version 2, with tables stored as differences, to their bits: by
``delta`` and by ``lc``, and by ``delta`` with state stored as logarithmic differences.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.make_deltas import AGES, ALONE, DIM, DTYPES, ROWS, SPLIT, make
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.restore.chunks import ReadableChunk, read_content
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.links import check_digests
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

FOLDER = Path(__file__).parents[2] / "golden"
METHODS = {"delta": FOLDER / "deltas", "lc": FOLDER / "lc", "logdelta": FOLDER / "logdelta"}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(method: str) -> Path:
    return METHODS[method]


def check(root: Folder, expected: Path) -> None:
    chain, problems = newest(root)
    assert chain is not None
    assert problems == []
    content = read_content(root, chain)
    chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
    with np.load(expected, allow_pickle=False) as wanted:
        for table in (*DTYPES, ALONE):
            columns = SPLIT.get(table, [(0, DIM)])
            shards = [
                LocalShard(
                    table,
                    TableShape(ROWS, DIM),
                    Rectangle(0, ROWS, *part),
                    torch.full((ROWS, part[1] - part[0]), -1.0).to(DTYPES.get(table)),
                    {"momentum1": torch.full((ROWS,), -1.0)},
                )
                for part in columns
            ]
            rows = RowRestore(content, {table: table}, Fit())
            keys = rows.plan(shards, None)

            def readable(key: str) -> ReadableChunk:
                return ReadableChunk(
                    chunks[key], partial(read_chunk, root, chunks[key]), nullcontext()
                )

            for key in rows.link_keys:
                rows.build(readable(key))
            check_digests(chain.head, {table: len(columns)}, [rows.digests()])
            for key in keys:
                rows.load(readable(key), False)
            rows.finish(False)
            for shard, (first, _) in zip(shards, columns, strict=True):
                found = shard.weight.contiguous().view(torch.uint8).numpy()
                assert found.tobytes() == wanted[f"{table}.{first}"].tobytes(), table
                sums = shard.optimizer["momentum1"].view(torch.uint8).numpy()
                assert sums.tobytes() == wanted[f"{table}.{first}.momentum1"].tobytes(), table


def test_links_are_read(golden: Path) -> None:
    assert [found.problems for found in verify(golden)] == [()] * AGES
    check(Folder(golden), golden / "expected.npz")
    assert sum(file.stat().st_size for file in golden.rglob("*") if file.is_file()) < 150_000


def test_a_compacted_one_is_the_same(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / "run")
    assert compact(tmp_path / "run") is not None
    check(Folder(tmp_path / "run"), golden / "expected.npz")


def test_the_script_makes_such_checkpoints(method: str, tmp_path: Path) -> None:
    make(tmp_path, method)
    check(Folder(tmp_path), tmp_path / "expected.npz")


@pytest.mark.parametrize("part", [(0, 30), (10, 60)])
def test_rows_of_other_ranks(golden: Path, part: tuple[int, int]) -> None:
    """Build a part of the rows, in columns joined from those stored."""
    root = Folder(golden)
    chain, _ = newest(root)
    assert chain is not None
    content = read_content(root, chain)
    chunks = {chunk.key: chunk for each in content.chunks for chunk in each}
    shard = LocalShard(
        "fp32",
        TableShape(ROWS, DIM),
        Rectangle(*part, 0, DIM),
        torch.zeros(part[1] - part[0], DIM),
        {"momentum1": torch.zeros(part[1] - part[0])},
    )
    rows = RowRestore(content, {"fp32": "fp32"}, Fit())
    keys = rows.plan([shard], None)
    for load, wanted in ((rows.build, rows.link_keys), (partial(rows.load, dry_run=False), keys)):
        for key in wanted:
            chunk = chunks[key]
            load(ReadableChunk(chunk, partial(read_chunk, root, chunk), nullcontext()))
    rows.finish(False)
    with np.load(golden / "expected.npz") as expected:
        halves = [
            expected[f"fp32.{first}"].view(np.float32)[slice(*part)] for first, _ in SPLIT["fp32"]
        ]
        sums = sum(
            (stop - first)
            / DIM
            * expected[f"fp32.{first}.momentum1"].view(np.float32)[slice(*part)].astype(np.float64)
            for first, stop in SPLIT["fp32"]
        )
    assert shard.weight.numpy().tobytes() == np.concatenate(halves, axis=1).tobytes()
    assert np.allclose(shard.optimizer["momentum1"].numpy(), sums, rtol=1e-6, atol=0)
