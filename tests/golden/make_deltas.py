"""Make the golden checkpoints with tables stored as differences, of format version 2.

    python -m tests.golden.make_deltas tests/golden/deltas
    python -m tests.golden.make_deltas tests/golden/lc --method lc
    python -m tests.golden.make_deltas tests/golden/logdelta --method logdelta

As ``make`` does: made once, with the values that they restore to beside them in ``expected.npz``.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from torchrec_checknrun.codecs import Chained, Delta, Fisher, LcCheckpoint, RowContext
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.digest import text_of
from torchrec_checknrun.delta.references import Note, References, Upon
from torchrec_checknrun.delta.rows import values_of
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.manifest import (
    Link,
    Manifest,
    TableDigests,
    TableTotals,
    version_of,
)
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import add_totals, write_rank_file
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder

ROWS, DIM, AGES = 60, 12, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types of the tables stored as differences, by table; ``fp32`` is split by columns."""
SPLIT = {"fp32": [(0, 5), (5, DIM)]}
LC_BITS = {"fp32": 2, "bf16": 3, "fp16": 4}
T = TypeVar("T")
ALONE = "fisher"
"""A table of rows that stand alone."""


@dataclass(frozen=True)
class Recorder:
    """Encodes rows upon references and keeps what they restore to."""

    changes: Transaction
    references: References
    restored: torch.Tensor

    @property
    def base(self) -> bool:
        return self.changes.base

    def encode(self, ids: torch.Tensor, upon: Upon[T]) -> T:
        return self.changes.encode(self.references, ids, self._noting(ids, upon))

    def _noting(self, ids: torch.Tensor, upon: Upon[T]) -> Upon[T]:
        def encode(references: References, positions: np.ndarray, note: Note, /) -> T:
            found = upon(references, positions, note)
            if isinstance(found, tuple):  # of weights, with what they restore to
                rows = found[1](np.arange(len(ids)))
                self.restored[ids] = values_of(rows, self.restored.dtype)
            return found

        return encode


def make_rows(table: str, age: int, columns: tuple[int, int]) -> RowBlock:
    """Make random rows: all of a base, some of a link; some untrained, reset or not finite."""
    seed = 1000 * ([*DTYPES, ALONE].index(table) + 1) + 10 * age
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(ROWS, generator=generator) < 0.4
    ids = torch.arange(ROWS)[some] if age else torch.arange(ROWS)
    weight = torch.randn((ROWS, DIM), generator=generator) * 0.1
    every = torch.arange(ROWS)
    weight[every % 13 == age, 0] = torch.tensor([float("nan"), float("inf")])[age % 2]
    weight[every % 17 == age, 1] *= 2.0**40
    sums = torch.rand(ROWS, generator=generator) * 2.0 ** (age - 8.0)
    sums[every % 7 == 3 + age] = 0.0  # never trained, or evicted
    part = weight[ids, slice(*columns)].to(DTYPES.get(table, torch.float32))
    states = {"momentum1": sums[ids]}
    return RowBlock(table, TableShape(ROWS, DIM), columns, ids, part, None, states)


def codec_of(table: str, method: str) -> Chained:
    return LcCheckpoint(LC_BITS[table]) if method == "lc" else Delta(step=2.0**-12)


def make(into: Path, method: str = "delta") -> None:
    """Write a base and links upon it, and the values that they restore to."""
    parent: Link | None = None
    expected: dict[str, torch.Tensor] = {}
    held: dict[tuple[str, tuple[int, int]], References] = {}
    for age in range(AGES):
        name = f"seq-{age + 1:06d}_step-{100 * (age + 1):08d}_{age:08x}"
        folder = Folder(into) / name
        folder.create()
        digests = {}
        chunks: list[EncodedChunk] = []
        for table in DTYPES:
            ranges = SPLIT.get(table, [(0, DIM)])
            keys = [(table, columns) for columns in ranges]
            codec = codec_of(table, method)
            for key in keys:
                states = ["momentum1"] if method == "logdelta" else []
                held.setdefault(key, codec.references(table, Rectangle(0, ROWS, *key[1]), states))
            changes = Transaction([held[key] for key in keys], base=age == 0)
            for key in keys:
                chunks += _encode(codec, changes, held[key], age, expected)
            before, after = changes.digests()[table]
            digests[table] = TableDigests(
                None if before is None else text_of(before), text_of(after)
            )
            changes.keep()
        chunks.append(_encode_alone(age, expected))
        manifest = _manifest(folder, name, age, parent, chunks, digests)
        folder.put(MANIFEST_NAME, manifest.to_bytes())
        parent = manifest.link
    values = {key: _bits(value).numpy() for key, value in expected.items()}
    np.savez_compressed(into / "expected.npz", **values)  # type: ignore[arg-type]  # text keys


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _encode(
    codec: Chained,
    changes: Transaction,
    references: References,
    age: int,
    expected: dict[str, torch.Tensor],
) -> list[EncodedChunk]:
    """Encode a table's rows in two chunks."""
    block = make_rows(references.table, age, references.columns)
    dim = references.columns[1] - references.columns[0]
    key = f"{references.table}.{references.columns[0]}"
    none = torch.zeros((ROWS, dim), dtype=block.weight.dtype)
    recorder = Recorder(changes, references, expected.setdefault(key, none))
    scheme = "logdelta" if references.states else "fp32"
    encoding = TableEncoding(codec.upon(recorder), scheme, compress=age % 2 == 1)
    sums = expected.setdefault(f"{key}.momentum1", torch.zeros(ROWS))
    sums[block.ids] = block.optimizer["momentum1"]
    half = len(block.ids) // 2
    parts = (slice(half), slice(half, None))
    chunks = [encode_rows(_part(block, rows), encoding) for rows in parts]
    if references.states:
        codes = references.states["momentum1"].gather(block.ids.numpy())
        sums[block.ids] = log_levels.values_of(codes)
    return chunks


def _part(block: RowBlock, rows: slice) -> RowBlock:
    states = {name: state[rows] for name, state in block.optimizer.items()}
    return RowBlock(
        block.table,
        block.shape,
        block.columns,
        block.ids[rows],
        block.weight[rows],
        None,
        states,
    )


def _encode_alone(age: int, expected: dict[str, torch.Tensor]) -> EncodedChunk:
    block = make_rows(ALONE, age, (0, DIM))
    codec = Fisher(step=2.0**-12)
    encoded = codec.encode(block.weight, None, _context(block))
    assert encoded.restored is not None
    whole = expected.setdefault(f"{ALONE}.0", torch.zeros((ROWS, DIM)))
    whole[block.ids] = encoded.restored(torch.arange(len(block.ids)))
    sums = expected.setdefault(f"{ALONE}.0.momentum1", torch.zeros(ROWS))
    sums[block.ids] = block.optimizer["momentum1"]
    return encode_rows(block, TableEncoding(codec))


def _context(block: RowBlock) -> RowContext:
    return RowContext(block.optimizer, block.ids)


def _manifest(
    folder: Folder,
    name: str,
    age: int,
    parent: Link | None,
    chunks: list[EncodedChunk],
    digests: dict[str, TableDigests],
) -> Manifest:
    summaries = [write_rank_file(folder, rank, iter(chunks[rank::2])) for rank in range(2)]
    tables: dict[str, TableTotals] = {}
    for summary in summaries:
        for table, total in summary.tables.items():
            tables[table] = add_totals(tables[table], total) if table in tables else total
    return Manifest(
        id=name,
        sequence=age + 1,
        step=100 * (age + 1),
        kind="differential" if parent else "full",
        parent=parent,
        previous=parent,
        world_size=2,
        created_at="2026-01-02T03:04:05.678+00:00",
        created_by="torchrec_checknrun, golden",
        lossy_restores=0,
        bits=None,
        tables=tables,
        states={},
        dense_bytes=0,
        files=tuple(summary.file for summary in summaries),
        lineage="0123456789abcdef",
        epoch=3,
        deltas=digests,
        format_version=version_of(digests),
    ).sealed()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", choices=["delta", "lc", "logdelta"], default="delta")
    arguments = parser.parse_args()
    if os.path.exists(arguments.folder):
        parser.error(f"{arguments.folder} exists: golden checkpoints are made once")
    make(arguments.folder, arguments.method)
