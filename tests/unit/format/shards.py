"""Make shards in the middle of larger tables, and chunks of their rows as read from storage."""

import json
from typing import Any

import torch
from msgspec import to_builtins

from torchrec_checknrun.codecs import Codec
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows, TableShape


def encode(shard: LocalShard, rows: Rows, codec: Codec) -> EncodedChunk:
    return encode_rows(shard.block(rows.ids), TableEncoding(codec))


def make_shard(
    rows: int,
    cols: int,
    row_start: int = 0,
    col_start: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    states: dict[str, tuple[torch.dtype, bool]] | None = None,
    seed: int = 0,
) -> LocalShard:
    """Make a shard in the middle of a larger table, with row-wise or pointwise states."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = {
        name: torch.rand((rows,) if rowwise else (rows, cols), generator=generator).to(of)
        for name, (of, rowwise) in (states or {}).items()
    }
    return LocalShard(
        table="sparse.ebc.embedding_bags.täble",
        shape=TableShape(row_start + rows + 5, col_start + cols + 3),
        rectangle=Rectangle(row_start, row_start + rows, col_start, col_start + cols),
        weight=torch.randn((rows, cols), generator=generator).to(dtype),
        optimizer=optimizer,
    )


def stored(chunk: EncodedChunk) -> tuple[dict[str, Any], bytes]:
    """Return a chunk as read from storage: the entry through JSON, and the bytes."""
    return json.loads(json.dumps(to_builtins(chunk.entry))), chunk.getvalue()
