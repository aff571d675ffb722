"""Check that whatever is written as a chunk of rows is read again: readers bound what few bytes may
stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from torchrec_checknrun.codecs import (
    NO_CONTEXT,
    Codec,
    CodecSpec,
    Encoded,
    Fisher,
    LcCheckpoint,
    Parameters,
    RowContext,
    register,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.compaction.row_pieces import Piece, chunks_of
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.lc.rows import rows_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.row_chunk import encode_rows, rows_header
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape

T = TypeVar("T")


@register
class Nothing(Codec):
    """A user's codec that stores no byte of a row."""

    name = "test_written_is_read_nothing"
    lossy = True
    value_bits = 1

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version}

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        none = torch.empty(0, dtype=torch.int64)
        return Encoded(torch.zeros(1, dtype=torch.uint8), {}, none)

    def decode(
        self, data: torch.Tensor, parameters: Parameters, rows: int, start: int, out: torch.Tensor
    ) -> None:
        out.zero_()


@dataclass
class Upon:
    """Has rows encoded upon references, as a save of a link does."""

    references: References
    base: bool = False

    def encode(self, ids: torch.Tensor, upon: Callable[..., T]) -> T:
        return upon(self.references, ids.numpy(), lambda undo: None)


def block_of(weight: torch.Tensor, **optimizer: torch.Tensor) -> RowBlock:
    n, dim = weight.shape
    return RowBlock(
        table="t",
        shape=TableShape(n, dim),
        columns=(0, dim),
        ids=torch.arange(n),
        weight=weight,
        positions=None,
        optimizer=optimizer,
    )


def read(chunk: EncodedChunk) -> StoredRows:
    assert isinstance(chunk.entry, RowsEntry)
    return StoredRows(rows_header(chunk.entry), memoryview(bytearray(chunk.getvalue())))


@pytest.mark.parametrize("codec", [Fisher(constant=0.01), Nothing()], ids=lambda codec: codec.name)
def test_many_rows_in_few_bytes(codec: Codec) -> None:
    rows = torch.zeros(140_000, 128)  # 72 MB
    chunk = encode_rows(block_of(rows), TableEncoding(codec))
    assert torch.equal(read(chunk).values(slice(0, len(rows))), rows)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("n", "cols"), [(3, 1), (50, 24), (300_000, 20)])
def test_a_link_of_nothing_but_exceptions(compress: bool, n: int, cols: int) -> None:
    references = ValueReferences("t", Rectangle(0, n, 0, cols))
    references.scatter(np.arange(n), rows_of(torch.ones(n, cols)))
    rows = torch.full((n, cols), torch.nan)
    encoding = TableEncoding(LcCheckpoint(2).upon(Upon(references)), compress=compress)
    before = ValueReferences("t", Rectangle(0, n, 0, cols))
    before.scatter(np.arange(n), rows_of(torch.ones(n, cols)))
    read(encode_rows(block_of(rows), encoding)).add_to(before, slice(0, n))
    assert np.isnan(before.gather(np.arange(n)).codes.view(np.float32)).all()


def test_a_compacted_link_of_nothing_but_exceptions() -> None:
    rows = torch.full((50, 24), torch.nan)
    stored = read(encode_rows(block_of(rows), TableEncoding(LcCheckpoint(2), compress=True)))
    (joined,) = chunks_of([Piece.of(stored, None)])
    assert read(joined).values(slice(0, 50)).isnan().all()


def test_what_no_encoder_writes_is_refused_still() -> None:
    chunk = encode_rows(block_of(torch.zeros(4, 8)), TableEncoding(Fisher(constant=0.01)))
    entry = chunk.entry
    assert isinstance(entry, RowsEntry)
    with pytest.raises(CorruptCheckpoint, match="can't stand for"):
        rows_header(replace(entry, count=10**7, last=10**7 - 1, table_rows=10**7))
