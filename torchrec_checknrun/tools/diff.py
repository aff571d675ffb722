"""Compare two checkpoints: rows by table, and values of the dense part.

Both chains are read a window of rows at a time, through one cache of chunks, so that common chunks
are read once. Windows without a row of a checkpoint that is in only one chain are equal, and
skipped. Memory: two windows, and the cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.format.chunk import dtype_name
from torchrec_checknrun.format.reader import coalesced_reads, read_chunk
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shards import Rows
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.dense import read_dense
from torchrec_checknrun.tools.tables import CACHE_BYTES, ChunkCache, TableReader
from torchrec_checknrun.values.state import encode_state

WINDOW_BYTES = 64 << 20
"""Bytes in memory of one chain's window of rows, optimizer state included."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TableDifference:
    """The difference of one table.

    Attributes:
        changed_rows: number of rows of which any bit of the weights differs.
        changed_states: number of rows of which any bit of the optimizer state differs; all rows, if
            the states are of different kinds.
        not_finite: number of changed rows with a NaN or an infinity on either side; they are
            excluded from the norms below.
        norm: l2 norm of the change of all rows.
        relative: ``norm`` over the former l2 norm of the changed rows; None if that is 0.
        mean_row_norm, max_row_norm: mean and maximum of the changed rows' l2 norms of change.
    """

    table: str
    rows: int
    dim: int
    changed_rows: int
    changed_states: int
    not_finite: int
    norm: float
    relative: float | None
    mean_row_norm: float
    max_row_norm: float


@dataclass(frozen=True)
class Difference:
    """The difference of two checkpoints.

    Attributes:
        only_before, only_after: tables of only one checkpoint.
        reshaped: both sizes and data types of tables that differ in them, by table.
        dense_changed, dense_only_before, dense_only_after: names of values that are no table rows.
        dense_values: number of such values in both checkpoints.
    """

    before: str
    after: str
    tables: tuple[TableDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    reshaped: dict[str, str]
    dense_changed: tuple[str, ...]
    dense_only_before: tuple[str, ...]
    dense_only_after: tuple[str, ...]
    dense_values: int


def compare(
    root: str | os.PathLike[str] | Folder,
    before: str,
    after: str,
    *,
    window_bytes: int = WINDOW_BYTES,
    cache_bytes: int = CACHE_BYTES,
    progress: Callable[[int, int], object] | None = None,
) -> Difference:
    """Compare two checkpoints as a restore would give them.

    Args:
        root: the folder or fsspec URL of both checkpoints.
        before, after: their ids.
        window_bytes: bytes of rows to compare together, at least one row.
        cache_bytes: bytes of chunks to keep for the next window.
        progress: called after every window with the rows compared so far and all rows.

    Raises:
        CheckpointNotFound, ChainBroken, CorruptCheckpoint, UnsupportedFormat: can't read one.
        StorageFailed: the storage doesn't answer.
    """
    folder = Folder.of(root)
    chains = [resolve(folder, id) for id in (before, after)]
    contents = [read_content(folder, each) for each in chains]
    chunks = chain.from_iterable(part for content in contents for part in content.chunks)
    read = partial(read_chunk, folder, at_hand=coalesced_reads(folder, chunks).part)
    cache = ChunkCache(folder, cache_bytes, read)
    tables = [each.head.tables for each in chains]
    both = [name for name in tables[0] if name in tables[1]]
    readers = {
        name: (TableReader(contents[0], name, cache), TableReader(contents[1], name, cache))
        for name in both
    }
    reshaped = {
        name: f"{_kind(one)} before, {_kind(other)} after"
        for name, (one, other) in readers.items()
        if _kind(one) != _kind(other)
    }
    total = sum(readers[name][0].shape.rows for name in both if name not in reshaped)
    done = 0

    def step(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    compared = tuple(
        _compare(one, other, window_bytes, step)
        for name, (one, other) in readers.items()
        if name not in reshaped
    )
    return Difference(
        before=before,
        after=after,
        tables=compared,
        only_before=tuple(sorted(tables[0].keys() - tables[1].keys())),
        only_after=tuple(sorted(tables[1].keys() - tables[0].keys())),
        reshaped=reshaped,
        **_dense(*(read_dense(folder, content.chunks[-1]) for content in contents)),
    )


def _dense(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Compare the dense parts; return the fields of ``Difference`` about them."""
    common = before.keys() & after.keys()
    return {
        "dense_changed": tuple(sorted(k for k in common if not same(before[k], after[k]))),
        "dense_only_before": tuple(sorted(before.keys() - common)),
        "dense_only_after": tuple(sorted(after.keys() - common)),
        "dense_values": len(common),
    }


def same(one: Any, other: Any) -> bool:
    """Tell whether two values of the dense part are equal, to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(*flat)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        # Values, not bytes: long doubles contain padding.
        has_nan = one.dtype.kind in "fcmM"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=has_nan)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    if type(one) is not type(other):
        return False
    # Or equal as stored: a NaN inside is not equal to itself.
    return bool(one == other) or encode_state(one, "")[0] == encode_state(other, "")[0]


def _kind(reader: TableReader) -> str:
    return f"{reader.shape.rows} × {reader.shape.dim} {dtype_name(reader.dtype)}"


def _compare(
    before: TableReader, after: TableReader, window_bytes: int, step: Callable[[int], None]
) -> TableDifference:
    rows, changed, states, not_finite = before.shape.rows, 0, 0, 0
    squares, squares_before, sum_norms, most = 0.0, 0.0, 0.0, 0.0
    size = max(1, window_bytes // max(1, before.row_bytes))
    comparable = before.states == after.states
    done = 0
    for first, last in _may_differ(before, after):
        for start in range(first, last, size):
            stop = min(start + size, last)
            one, other = before.window(start, stop), after.window(start, stop)
            differs = _differ(one.weight, other.weight)
            if comparable:
                states += int(_states_differ(one, other).sum())
            old, new = one.weight[differs].double(), other.weight[differs].double()
            finite = old.isfinite().all(dim=1) & new.isfinite().all(dim=1)
            norms = (new[finite] - old[finite]).norm(dim=1)
            changed += len(old)
            not_finite += len(old) - len(norms)
            squares += float(norms.square().sum())
            squares_before += float(old[finite].square().sum())
            sum_norms += float(norms.sum())
            most = max(most, float(norms.max()) if len(norms) else 0.0)
            step(stop - done)
            done = stop
    step(rows - done)
    measured = changed - not_finite
    return TableDifference(
        table=before.table,
        rows=rows,
        dim=before.shape.dim,
        changed_rows=changed,
        changed_states=states if comparable else rows,
        not_finite=not_finite,
        norm=math.sqrt(squares),
        relative=math.sqrt(squares / squares_before) if squares_before else None,
        mean_row_norm=sum_norms / measured if measured else 0.0,
        max_row_norm=most,
    )


def _may_differ(before: TableReader, after: TableReader) -> list[tuple[int, int]]:
    """Return disjoint ascending ranges of rows of which only one chain has a chunk."""
    one, other = before.places, after.places
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted((one | other)[key] for key in one.keys() ^ other.keys()):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        else:
            ranges.append((start, stop))
    return ranges


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows that differ in any bit."""
    bits = _BITS[one.dtype.itemsize]
    unequal = one.view(bits) != other.view(bits)
    return unequal.any(dim=1) if unequal.dim() == 2 else unequal


def _states_differ(one: Rows, other: Rows) -> torch.Tensor:
    differs = torch.zeros(len(one.ids), dtype=torch.bool)
    for name, state in one.optimizer.items():
        differs |= _differ(state, other.optimizer[name])
    return differs
