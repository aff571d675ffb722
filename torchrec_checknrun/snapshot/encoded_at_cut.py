"""Choose the tables whose rows are encoded while training waits; estimate sizes in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

import torch

from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.snapshot.items import BlockItem, ChunkItem, RowsItem
from torchrec_checknrun.snapshot.staged import StagedRows, aligned, rows_size, tensors_size

StagingMode = Literal["copy_on_write", "auto", "copy", "encode"]
"""The way in which rows are copied: on write, where their table allows it (else as ``auto``), or
while training waits, as they are, or encoded, or whatever takes less time.
"""
_TRIAL_ROWS = 16384
_MOST_THREADS = 8
"""More threads find no more memory bandwidth."""


def idle_threads() -> int:
    """Count the helper threads that would find a processor of their own, while all ranks of the
    machine copy.
    """
    processors = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(_MOST_THREADS, processors // torch.get_num_threads()) - 1)


def encoded_size(shard: LocalShard, rows: int, encoding: TableEncoding) -> int:
    """Estimate the bytes of staging memory for rows encoded during the stall; at most those of a
    copy.
    """
    width = 8 * shard.weight.element_size()
    fewer = max(0, width - encoding.codec.value_bits)
    return rows_size(shard, rows) - rows * shard.rectangle.cols * fewer // 8


def copied_size(item: RowsItem | BlockItem | ChunkItem) -> int:
    """Return the bytes of staging memory for a copy of an item, which is the most that it takes."""
    if isinstance(item, RowsItem):
        return tensors_size(item.shard.tensors, item.count)
    if isinstance(item, BlockItem):
        size = item.piece.volume * item.block.tensor.element_size()
    else:
        size = sum(item.chunk.sizes)
    return aligned(size)


def encoded_while_staged(
    shards: list[LocalShard], quantization: Quantization, mode: StagingMode
) -> frozenset[str]:
    """Choose the tables to encode during the stall. Excluded are tables whose codec needs a global
    plan first, or references, which the background changes.

    Args:
        mode: ``encode`` chooses all; the others but ``copy`` choose tables where encoding, in a
            trial on some rows, is no slower than copying.
    """
    if mode == "copy":
        return frozenset()
    chosen: set[str] = set()
    faster: dict[tuple[str, int, torch.device], bool] = {}
    for shard in sorted(shards, key=lambda s: -s.rectangle.rows):
        encoding = quantization.for_table(shard.table, shard.shape.rows)
        if encoding.codec.surveys or encoding.codec.chained or not shard.rectangle.rows:
            continue
        key = (repr(encoding), shard.rectangle.cols, shard.weight.device)
        if mode != "encode" and key not in faster:
            faster[key] = encoding.codec.lossy and _encodes_as_fast(shard, encoding)
        if mode == "encode" or faster[key]:
            chosen.add(shard.table)
    return frozenset(chosen)


def _encodes_as_fast(shard: LocalShard, encoding: TableEncoding) -> bool:
    """Time whether rows are encoded as fast as they are copied; the best of three trials counts.
    In a stall several threads copy, but only one at a time encodes.
    """
    rows = shard.rectangle.rows
    positions = torch.arange(0, rows, max(1, -(-rows // _TRIAL_ROWS)), device="cpu")
    staged = StagedRows.plan(shard, len(positions), encoding, 0)
    size, on_gpu = rows_size(shard, len(positions)), shard.weight.is_cuda
    memory = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)

    def copy() -> None:
        staged.copy(shard, positions, memory)
        if on_gpu:
            torch.cuda.synchronize(shard.weight.device)

    def encode() -> None:
        encode_rows(shard.block(positions + shard.rectangle.row_start), encoding)

    copying = 1 if on_gpu else 1 + idle_threads()
    return _best_seconds(encode) <= _best_seconds(copy) / copying


def _best_seconds(act: Callable[[], None]) -> float:
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return min(taken)
