"""Make the golden checkpoints of the current format version, once, at its release.

    python -m tests.golden.make tests/golden/v2

The values that they restore to stand beside them in ``expected.npz``. Golden checkpoints are never
made again: their test shows that every later release still reads what this one wrote.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from tests.unit.entries import decode_rows
from torchrec_checknrun.codecs import Bf16, Exact, Fp16, ImportanceWeighted, KMeans, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
from torchrec_checknrun.format.difference import difference
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.manifest import Link, Manifest, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import FileSummary, add_totals, write_rank_file
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.shards import RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.state import encode_state

ROWS, DIM, RANKS = 72, 12, 2
ENCODINGS = {
    "exact": TableEncoding(Exact()),
    "exact_zstd": TableEncoding(Exact(), compress=True),
    "fp16": TableEncoding(Fp16()),
    "bf16": TableEncoding(Bf16(), "bf16"),
    "rowwise8": TableEncoding(Rowwise(8)),
    "rowwise4": TableEncoding(Rowwise(4), "log8"),
    "rowwise4_zstd": TableEncoding(Rowwise(4, "asymmetric"), "log8", compress=True),
    "rowwise3": TableEncoding(Rowwise(3, "symmetric")),
    "rowwise2": TableEncoding(Rowwise(2, "greedy"), "bf16"),
    "importance": TableEncoding(ImportanceWeighted()),
    "kmeans": TableEncoding(KMeans(4)),
    "kmeans_block": TableEncoding(KMeans(3, 32)),
}
"""Encodings by table."""
STATES = {"momentum1": True, "exp_avg": False}
"""Optimizer states, and whether they are row-wise."""
STATE: dict[str, Any] = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "array": np.arange(5, dtype="<i2"),
    "scalar": np.float64(0.1),
    "nested": [1, (2.5, None), {"text": "täxt", 7: True}],
    "bytes": b"\x00\xff",
    "infinity": float("-inf"),
    "large": torch.linspace(0, 1, 1000),
}


def ids_of(age: int, rank: int) -> list[int]:
    """Choose the rows of a rank's checkpoint: all, a random half, few, a range."""
    own = np.arange(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    if age == 1:
        own = own[np.random.default_rng(rank).random(len(own)) < 0.5]
    if age == 2:
        own = own[[0, 5, 30]]
    return (own[10:20] if age == 3 else own).tolist()


def make_rows(table: str, age: int, rank: int, columns: tuple[int, int]) -> RowBlock:
    """Make random rows; one in twelve can't be quantized."""
    seed = 1000 * list(ENCODINGS).index(table) + 100 * age + 10 * rank + columns[0]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(ids_of(age, rank))
    cols = columns[1] - columns[0]
    weight = torch.randn((len(ids), cols), generator=generator) * 0.05
    weight[ids % 12 == 5, 0] = torch.tensor([float("nan"), float("inf")])[age % 2]
    states = {
        name: torch.rand((len(ids),) if rowwise else (len(ids), cols), generator=generator)
        for name, rowwise in STATES.items()
    }
    return RowBlock(table, TableShape(ROWS, DIM), columns, ids, weight, None, states)


def make(into: Path) -> None:
    """Write a full checkpoint and three upon it, and the values that they restore to."""
    expected: dict[str, Any] = {}
    parent: Link | None = None
    before: list[dict[str, bytes]] = [{} for _ in range(RANKS)]
    for age in range(4):
        name = f"seq-{age + 1:06d}_step-{100 * (age + 1):08d}_{age:08x}"
        folder = Folder(into) / name
        folder.create()
        summaries = [
            _write_rank(folder, age, rank, expected, before[rank]) for rank in range(RANKS)
        ]
        manifest = _manifest(name, age, parent, summaries)
        folder.put(MANIFEST_NAME, manifest.to_bytes())
        parent = manifest.link
    np.savez_compressed(into / "expected.npz", **expected)


def _write_rank(
    folder: Folder,
    age: int,
    rank: int,
    expected: dict[str, np.ndarray],
    before: dict[str, bytes],
) -> FileSummary:
    chunks = []
    for table, encoding in ENCODINGS.items():
        for columns in [(0, 5), (5, DIM)] if table == "exact" else [(0, DIM)]:
            block = make_rows(table, age, rank, columns)
            chunk = encode_rows(block, encoding)
            chunks.append(chunk)
            rows = decode_rows(chunk.entry, chunk.getvalue())
            _put(expected, f"{table}.weight", block, columns, rows.weight)
            for state, values in rows.optimizer.items():
                _put(expected, f"{table}.{state}.{columns[0]}", block, (0, 0), values)
    if rank == 0:
        chunks.append(state_chunk("model", None, *encode_state(STATE | {"age": age}, "model")))
    chunks.append(state_chunk("rng", rank, *encode_state({"drawn": rank + 10 * age}, "rng")))
    return write_rank_file(folder, rank, iter([_as_difference(c, before) for c in chunks]))


def _as_difference(chunk: EncodedChunk, before: dict[str, bytes]) -> EncodedChunk:
    """Store a state as a difference to the parent's, where that is smaller; remember it."""
    if not isinstance(chunk.entry, StateEntry):
        return chunk
    content, parent = chunk.getvalue(), before.get(chunk.entry.name, b"")
    before[chunk.entry.name] = content
    found = difference(memoryview(content), memoryview(parent), 4)
    if found is None:
        return chunk
    return EncodedChunk(replace(chunk.entry, difference=found[1]), [found[0]])


def _put(
    expected: dict[str, np.ndarray],
    key: str,
    block: RowBlock,
    columns: tuple[int, int],
    values: torch.Tensor,
) -> None:
    if columns[1]:  # weights, perhaps of some columns
        whole = expected.setdefault(key, np.zeros((ROWS, DIM), np.float32))
        whole[block.ids.numpy(), slice(*columns)] = values.numpy()
    else:
        shape = (ROWS, *values.shape[1:])
        expected.setdefault(key, np.zeros(shape, np.float32))[block.ids.numpy()] = values.numpy()


def _manifest(name: str, age: int, parent: Link | None, summaries: list[FileSummary]) -> Manifest:
    tables: dict[str, TableTotals] = {}
    for summary in summaries:
        for table, total in summary.tables.items():
            tables[table] = add_totals(tables[table], total) if table in tables else total
    fields: dict[str, Any] = {"lineage": "0123456789abcdef", "epoch": 3}
    return Manifest(
        id=name,
        sequence=age + 1,
        step=100 * (age + 1),
        kind="differential" if parent else "full",
        parent=parent,
        previous=parent,
        world_size=RANKS,
        created_at="2026-01-02T03:04:05.678+00:00",
        created_by="torchrec_checknrun, golden",
        lossy_restores=1,
        bits=4,
        tables=tables,
        states={"model": False, "rng": True},
        dense_bytes=sum(summary.dense_bytes for summary in summaries),
        files=tuple(summary.file for summary in summaries),
        format_version=2 if any(summary.needs_parent for summary in summaries) else 1,
        earlier_fractions=(0.25,) * max(0, age - 1),
        **fields,
    ).sealed()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if os.path.exists(arguments.folder):
        parser.error(f"{arguments.folder} exists: golden checkpoints are made once")
    make(arguments.folder)
