"""A compacted checkpoint is laid out as a full one: whole runs of rows, each a chunk."""

from __future__ import annotations

import errno
import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.chains import (
    CODECS,
    DIM,
    TABLE,
    Part,
    content_of,
    encode,
    write,
    write_chain,
)
from tests.unit.compaction.compacted import (
    WHOLE,
    assert_restores_alike,
    compacted,
    flip,
    small_chain,
)
from tests.unit.entries import fields
from torchrec_checknrun.codecs import (
    Codec,
    Exact,
    Fisher,
    ImportanceWeighted,
    KMeans,
    Method,
    Rowwise,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.compaction.row_pieces import Piece, chunks_of
from torchrec_checknrun.compaction.row_ranges import RowRanges
from torchrec_checknrun.compaction.spool import Spool
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.format.row_chunk import RowsHeader, rows_header
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore import chunks as reading
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("small_operations")

ROWS = 100
PLACES = [Rectangle(0, ROWS, *WHOLE)]


@pytest.fixture
def root(memory_root: Folder) -> Folder:
    return memory_root


def rows_of(root: Folder, checkpoint: str) -> list[StoredChunk]:
    chunks = content_of(root, checkpoint).chunks[-1]
    return [chunk for chunk in chunks if fields(chunk)["kind"] == "rows"]


def runs(root: Folder, checkpoint: str) -> list[tuple[int, int, int]]:
    """Return first and last row of each chunk, and how many it has."""
    entries = [fields(chunk) for chunk in rows_of(root, checkpoint)]
    return sorted((e["first"], e["last"], e["count"]) for e in entries)


def chain_of(root: Folder, encodings: list[TableEncoding]) -> str:
    """Write a full checkpoint in chunks of 20 rows, and differential ones spread over all rows."""
    parts = [
        Part(WHOLE, list(range(ROWS)), 20, encoding=encodings[0]),
        *(
            Part(WHOLE, list(range(start, ROWS, 7)), 9, encoding=encoding)
            for start, encoding in enumerate(encodings[1:], start=1)
        ),
    ]
    return write_chain(root, ROWS, [[part] for part in parts])


def same(encoding: TableEncoding) -> list[TableEncoding]:
    return [encoding] * 4


@pytest.mark.parametrize(
    "encodings",
    [
        same(TableEncoding(Exact())),
        same(TableEncoding(Rowwise(4))),
        same(TableEncoding(Rowwise(2), "log8", compress=True)),
        same(TableEncoding(Rowwise(4, Method.GREEDY), "bf16")),
        [TableEncoding(ImportanceWeighted(constant=float(c))) for c in range(4)],
        [TableEncoding(Exact()), *same(TableEncoding(Exact(), "log8"))],
    ],
    ids=["exact", "4-bit", "2-bit-log8", "greedy", "importance", "exact-then-log8"],
)
def test_the_layout_is_the_baselines(root: Folder, encodings: list[TableEncoding]) -> None:
    head = chain_of(root, encodings)
    report = compacted(root)
    assert_restores_alike(root, head, report.id, PLACES)
    found = runs(root, report.id)
    if encodings[0].optimizer == encodings[1].optimizer:
        assert found == [(start, start + 19, 20) for start in range(0, ROWS, 20)]
    else:  # bytes of the two states don't go together: a chunk of each
        assert len(found) == 10


def test_rows_of_several_codecs_are_apart_and_stay_encoded(root: Folder) -> None:
    encodings = [TableEncoding(codec) for codec in (Rowwise(8), Rowwise(4), Exact(), Rowwise(4))]
    head = chain_of(root, encodings)
    report = compacted(root)
    assert_restores_alike(root, head, report.id, PLACES)
    chunks = rows_of(root, report.id)
    assert len(chunks) == 15  # three codecs in each of five runs
    widths = Counter(
        (fields(c)["weight"]["codec"]["name"], fields(c)["weight"]["value_bits"]) for c in chunks
    )
    assert widths == {("fbgemm_rowwise", 8): 5, ("fbgemm_rowwise", 4): 5, ("exact", 32): 5}
    first, last = read_manifest(root, head), read_manifest(root, report.id)
    assert last.tables[TABLE].value_bits == 4
    assert last.tables[TABLE].error_rows > first.tables[TABLE].error_rows


def test_each_chunk_is_read_once_and_superseded_ones_never(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = small_chain(root, TableEncoding(Rowwise(4), "log8", compress=True))
    content = content_of(root, head)
    superseded = [c for c in content.chunks[1] if fields(c)["kind"] == "rows"][1:]
    superseded += [c for c in content.chunks[0] if fields(c).get("first") == 30]
    for chunk in superseded:
        flip(root, chunk.checkpoint, chunk.file, chunk.entry.offset)
    read: Counter[str] = Counter()

    def counted(root: Folder, chunk: StoredChunk, **_: object) -> memoryview:
        read[chunk.key] += 1
        return read_chunk(root, chunk)

    monkeypatch.setattr(reading, "read_chunk", counted)
    report = compacted(root)
    assert set(read.values()) == {1}
    assert not read.keys() & {chunk.key for chunk in superseded}
    untouched = [c for c in content.chunks[0] if fields(c).get("first", 0) >= 50]
    stored = [bytes(read_chunk(root, chunk)) for chunk in rows_of(root, report.id)]
    assert len(untouched) == 5
    assert all(bytes(read_chunk(root, chunk)) in stored for chunk in untouched)
    assert runs(root, report.id) == [(start, start + 9, 10) for start in range(0, 100, 10)]


def test_rows_of_blocks_that_cannot_be_divided(root: Folder) -> None:
    """Keep blocks of k-means whole where they can be, and decode rows of others."""
    pytest.importorskip("kmeans1d", reason="encoding k-means codebooks needs kmeans1d")
    encoding = TableEncoding(KMeans(2, block_rows=4))
    full = write(root, ROWS, [Part(WHOLE, list(range(ROWS)), 20, encoding=encoding)])
    parts = [
        Part(WHOLE, list(range(20, 40)), 20, encoding=encoding),
        Part(WHOLE, [3], 1, encoding=encoding),
    ]
    head = write(root, ROWS, parts, full)
    report = compacted(root)
    assert_restores_alike(root, head.id, report.id, PLACES)
    kinds = Counter(fields(c)["weight"]["codec"]["name"] for c in rows_of(root, report.id))
    assert kinds == {"kmeans": 5, "exact": 1}  # rows 0 to 19 but 3 had to be decoded


def test_a_baseline_with_gaps_is_laid_out_anew(root: Folder) -> None:
    """Compact a chain upon chunks that share their range of rows."""
    parts = [Part(WHOLE, list(range(start, ROWS, 2)), 50) for start in range(2)]
    full = write(root, ROWS, parts)
    head = write(root, ROWS, [Part(WHOLE, [4, 5, 99], 2)], full)
    report = compacted(root)
    assert_restores_alike(root, head.id, report.id, PLACES)
    assert runs(root, report.id) == [(0, 99, 100)]


@settings(max_examples=examples(50), deadline=None)
@given(data=st.data(), rows=st.integers(1, 80), codec=st.sampled_from(CODECS))
def test_rows_divided_spooled_and_joined_are_the_same(
    data: st.DataObject, rows: int, codec: Codec
) -> None:
    """Divide chunks' rows anyhow, and join them: every row decodes to the same bits."""
    encoding = TableEncoding(codec, data.draw(st.sampled_from(["fp32", "log8", "rowlog8"])))
    chunks = encode(
        Part((0, DIM), list(range(rows)), data.draw(st.integers(1, rows)), encoding=encoding),
        rows,
        5,
    )
    stored = [decoded(chunk) for chunk in chunks]
    of_chunk = {int(i): (n, at) for n, s in enumerate(stored) for at, i in enumerate(s.ids)}
    memory = data.draw(st.sampled_from([1, 1 << 20]))
    with Spool.opened(memory) as spool:
        for number, one in enumerate(stored):
            taken = np.sort(data.draw(st.permutations(range(len(one.ids)))))
            cut = data.draw(st.integers(0, len(taken)))
            some = np.array(
                sorted(data.draw(st.sets(st.sampled_from(list(taken)), max_size=cut))), int
            )
            rest = np.setdiff1d(taken, some)
            for part in (some, rest):
                if len(part):
                    spool.put(number % 2, Piece.of(one, part if len(part) < len(taken) else None))
        found = 0
        for number in range(2):
            for chunk in chunks_of(spool.take(number)):
                joined = decoded(chunk)
                values = joined.rows()
                for at, row in enumerate(joined.ids):
                    which, place = of_chunk[int(row)]
                    wanted = stored[which].rows(slice(place, place + 1))
                    assert equal(values.weight[at : at + 1], wanted.weight)
                    for name, state in wanted.optimizer.items():
                        assert equal(values.optimizer[name][at : at + 1], state)
                    found += 1
    assert found == rows


def test_rows_of_other_steps_are_joined() -> None:
    """Each checkpoint settles its steps anew: a chunk for each would make ever smaller ones."""
    stored = []
    for constant, first in ((0.01, 0), (0.02, 1)):
        encoding = TableEncoding(Fisher(constant=constant))
        part = Part((0, DIM), list(range(first, 40, 2)), 40, encoding=encoding)
        stored += [decoded(chunk) for chunk in encode(part, 40, first)]
    (chunk,) = chunks_of([Piece.of(one, None) for one in stored])
    joined = decoded(chunk).rows()
    for first, one in enumerate(stored):
        assert equal(joined.weight[first::2], one.rows().weight)


class Full(io.BytesIO):
    """A temporary file on a disk without space."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_temporary_folder_is_not_the_storage() -> None:
    (chunk,) = encode(Part((0, DIM), [0, 1, 2], 3), 3, 5)
    with pytest.raises(StorageFailed, match=r"temporary file of this machine.*TMPDIR") as failed:
        Spool(Full()).put(0, Piece.of(decoded(chunk), None))
    assert failed.value.errno == errno.ENOSPC


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def decoded(chunk: Any) -> StoredRows:
    header: RowsHeader = rows_header(chunk.entry)
    return StoredRows(header, memoryview(bytearray(chunk.getvalue())))


@given(rows=st.integers(1, 200), data=st.data())
def test_ranges_divide_any_rows(rows: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, rows))) | {rows})
    ranges = RowRanges(np.array([0, *cuts]), are_the_baseline=True)
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    parts = list(ranges.split(ids))
    assert np.concatenate([ids[here] for _, here in parts]).tolist() == ids.tolist()
    for number, here in parts:
        inside = ids[here]
        assert len(inside)
        assert ranges.starts[number] <= inside[0] <= inside[-1] < ranges.starts[number + 1]
