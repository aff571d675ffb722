"""Restore checkpoints of every released format version to their original bits, in every release."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.make import DIM, ENCODINGS, RANKS, ROWS, STATE, STATES, make
from tests.unit.entries import decode_stored, fields
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.format.manifest import FORMAT_VERSION
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.restore.chunks import ReadableChunk, read_content
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify

GOLDEN = sorted(path for path in (Path(__file__).parents[2] / "golden").glob("v*"))


def restored(root: Folder) -> dict[str, np.ndarray]:
    """Restore all tables with their optimizer state, and the state objects."""
    chain, problems = newest(root)
    assert chain is not None
    assert problems == []
    content = read_content(root, chain)
    chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
    found: dict[str, np.ndarray] = {}
    for table in ENCODINGS:
        split = [(0, 5), (5, DIM)] if table == "exact" else [(0, DIM)]
        shards = [
            LocalShard(
                table,
                TableShape(ROWS, DIM),
                Rectangle(0, ROWS, *columns),
                torch.full((ROWS, columns[1] - columns[0]), -1.0),
                {
                    name: torch.full((ROWS,) if rowwise else (ROWS, columns[1] - columns[0]), -1.0)
                    for name, rowwise in STATES.items()
                },
            )
            for columns in split
        ]
        rows = RowRestore(content, {table: table}, Fit())
        for key in rows.plan(shards, None):
            chunk = chunks[key]
            payload = partial(read_chunk, root, chunk)
            rows.load(ReadableChunk(chunk, payload, nullcontext()), False)
        rows.finish(False)
        found[f"{table}.weight"] = torch.cat([shard.weight for shard in shards], dim=1).numpy()
        for shard, (first, _) in zip(shards, split, strict=True):
            for name, state in shard.optimizer.items():
                found[f"{table}.{name}.{first}"] = state.numpy()
    return found


def check(root: Folder, expected: Path) -> None:
    values = restored(root)
    with np.load(expected, allow_pickle=False) as wanted:
        assert set(wanted.files) == set(values)
        for name in wanted.files:
            assert values[name].tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_every_version_is_read(folder: Path) -> None:
    root = Folder(folder)
    assert [found.problems for found in verify(folder)] == [()] * 4
    check(root, folder / "expected.npz")
    chain, _ = newest(root)
    assert chain is not None
    states = {
        (fields(chunk)["name"], fields(chunk)["rank"]): decode_stored(
            chunk.entry, read_chunk(root, chunk)
        )
        for chunk in read_content(root, chain).chunks[-1]
        if fields(chunk)["kind"] == "state"
    }
    assert states["rng", 0] == {"drawn": 30}
    assert states["rng", 1] == {"drawn": 31}
    model = states["model", None]
    first = folder.name == "v1"  # which has no tensor that a difference would be made of
    assert model.keys() == (STATE.keys() - ({"large"} if first else set())) | {"age"}
    if not first:
        assert torch.equal(model["large"], STATE["large"])
        assert chain.head.format_version == FORMAT_VERSION
    assert torch.equal(model["weight"], STATE["weight"])
    assert torch.equal(model["half"], STATE["half"])
    assert model["array"].tolist() == list(range(5))
    assert model["array"].dtype == "<i2"
    for name in ("scalar", "nested", "bytes", "infinity"):
        assert model[name] == STATE[name]
        assert type(model[name]) is type(STATE[name])
    assert chain.head.lineage == "0123456789abcdef"
    assert (chain.head.epoch, chain.head.world_size) == (3, RANKS)
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 300_000


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_a_compacted_one_is_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    report = compact(tmp_path / "run")
    assert report is not None
    check(Folder(tmp_path / "run"), folder / "expected.npz")


def test_the_current_version_is_among_them(tmp_path: Path) -> None:
    """Run the script that makes golden checkpoints."""
    assert f"v{FORMAT_VERSION}" in [path.name for path in GOLDEN]
    pytest.importorskip("kmeans1d")
    make(tmp_path)
    check(Folder(tmp_path), tmp_path / "expected.npz")
