"""Check that whatever is written as a chunk of rows is read again: readers bound what few bytes may
stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
    codec_from_spec,
    register,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.compaction.row_pieces import Piece, chunks_of
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.lc.rows import rows_of
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CorruptCheckpoint, InvalidPlan, UnsupportedFormat
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
from torchrec_checknrun.format.entries import BlockEntry, RowsEntry
from torchrec_checknrun.format.rank_file import write_rank_file
from torchrec_checknrun.format.row_chunk import encode_rows, rows_header
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder

T = TypeVar("T")


@register
class Nothing(Codec):
    """A user's codec that stores no byte of a row."""

    name = "test_written_is_read_nothing"
    lossy = True
    value_bits = 1

    def __init__(
        self,
        parameters: Parameters | None = None,
        data: torch.Tensor | None = None,
        exceptions: torch.Tensor | None = None,
        **options: object,
    ) -> None:
        self._parameters = parameters or {}
        self._data = torch.zeros(1, dtype=torch.uint8) if data is None else data
        none = torch.empty(0, dtype=torch.int64)
        self._exceptions = none if exceptions is None else exceptions
        self._options = options

    def spec(self) -> CodecSpec:
        return {"name": self.name, "version": self.version, **self._options}

    def encode(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
        context: RowContext = NO_CONTEXT,
        out: torch.Tensor | None = None,
    ) -> Encoded:
        return Encoded(self._data, self._parameters, self._exceptions)

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


@dataclass
class Job:
    """A chunk to write."""

    chunk: EncodedChunk
    closed: bool = False

    def encode(self) -> EncodedChunk:
        return self.chunk

    def close(self) -> None:
        self.closed = True


def block_chunk(*path: str | int) -> EncodedChunk:
    entry = BlockEntry(path=path, dtype="float32", size=(2,), part=((0, 2),), shard=((0, 2),))
    return EncodedChunk(entry, [bytes(8)])


def rows_chunk(**given: Any) -> EncodedChunk:
    return encode_rows(block_of(torch.ones(4, 8)), TableEncoding(Nothing(**given)))


@pytest.mark.parametrize(
    "given",
    [
        {"data": torch.ones(4, 8, dtype=torch.int8)},  # would be read as uint8
        {"exceptions": torch.tensor([2, 1])},
        {"exceptions": torch.tensor([1, 1])},
        {"exceptions": torch.tensor([-1, 1])},
        {"exceptions": torch.tensor([4])},
        {"exceptions": torch.tensor([1], dtype=torch.int32)},
        {"exceptions": torch.tensor([False, True, False, False])},
    ],
)
def test_what_a_codec_returns_is_checked(given: dict[str, torch.Tensor]) -> None:
    with pytest.raises(InvalidPlan, match="must return data as uint8 on the CPU, and exceptions"):
        rows_chunk(**given)


REFUSED = {
    "a long option": (lambda: rows_chunk(book="x" * 5000), "length <= 4096"),
    "NaN": (lambda: rows_chunk(step=math.nan), "Expected `float`"),
    "a list of numbers": (lambda: rows_chunk(parameters={"levels": [0.5, 1.5]}), "`object`, got"),
    "NumPy's numbers": (lambda: rows_chunk(parameters={"step": np.float32(1)}), "numpy.float32"),
    "a key below zero": (lambda: block_chunk("state", -1), "Expected `int` >= 0"),
    "a key that is no Unicode": (lambda: block_chunk("\ud800"), "surrogates not allowed"),
    "a deep path": (lambda: block_chunk(*["a"] * 101), "a path of 101 keys"),
    "a long name": (lambda: state_chunk("x" * 5000, None, {"v": 1}, []), "length <= 4096"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_readers_would_refuse_is_not_committed(name: str, memory_root: Folder) -> None:
    make, message = REFUSED[name]
    folder, job = memory_root / "seq-000001_step-00000001_00000000", Job(make())
    folder.create()
    with pytest.raises(InvalidPlan, match=f"no reader would take a chunk of .*{message}"):
        write_rank_file(folder, 0, iter([job]))
    assert job.closed
    assert not folder.names()


@register
class Strict(Nothing):
    """A user's codec that takes each option and parameter for granted."""

    name = "test_written_is_read_strict"

    @classmethod
    def from_spec(cls, spec: CodecSpec) -> Codec:
        return cls(size=1 // spec["size"])  # type: ignore[operator]  # as users do

    def decode(
        self, data: torch.Tensor, parameters: Any, rows: int, start: int, out: torch.Tensor
    ) -> None:
        out.fill_(1 / parameters["step"])


@pytest.mark.parametrize("options", [{}, {"size": 0}])
def test_a_codec_that_takes_its_options_for_granted(options: dict[str, object]) -> None:
    spec = {"name": Strict.name, "version": 1, **options}
    with pytest.raises(UnsupportedFormat, match=Strict.name):
        codec_from_spec(spec)


@pytest.mark.parametrize("parameters", [{}, {"step": 0}])
def test_a_codec_that_takes_its_parameters_for_granted(parameters: Parameters) -> None:
    codec = Strict({"step": 1.0}, size=1)
    chunk = encode_rows(block_of(torch.ones(4, 8)), TableEncoding(codec))
    assert isinstance(chunk.entry, RowsEntry)
    weight = replace(chunk.entry.weight, parameters=parameters)
    chunk.entry = replace(chunk.entry, weight=weight)
    with pytest.raises(CorruptCheckpoint, match="can't be decoded"):
        read(chunk).rows()
