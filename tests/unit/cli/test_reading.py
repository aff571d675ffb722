"""Read by `cat` and `diff` the rows that a restore gives, bit for bit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from tests.unit.chains import (
    CODECS,
    DIM,
    STATES,
    TABLE,
    Part,
    apply_in_order,
    content_of,
    make_shards,
    new_root,
    random_parts,
    same_bits,
    splits,
    write,
    write_chain,
)
from tests.unit.console import Console
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format import reader as read_chunks
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, checkpoint_id
from torchrec_checknrun.format.reader import StoredChunk
from torchrec_checknrun.restore.fit import full_name
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import diff
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tools.tables import ChunkCache, TableReader

pytestmark = pytest.mark.usefixtures("small_operations")

WHOLE = (0, DIM)


@dataclass
class Expected:
    """A table with joined columns, read chunk by chunk in order."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    momentum1: torch.Tensor

    @classmethod
    def of(cls, root: Folder, head: str, columns: list[tuple[int, int]]) -> Expected:
        rows = resolve(root, head).head.tables[TABLE].rows
        shards = make_shards(rows, [Rectangle(0, rows, *c) for c in columns], fill=0.0)
        apply_in_order(root, head, shards)
        mean = sum(shard.optimizer["momentum1"] * shard.rectangle.cols for shard in shards)
        assert isinstance(mean, torch.Tensor)
        return cls(
            torch.cat([shard.weight for shard in shards], dim=1),
            torch.cat([shard.optimizer["exp_avg"] for shard in shards], dim=1),
            mean / DIM,
        )


def reader_of(root: Folder, head: str, cache_bytes: int = 1 << 20) -> TableReader:
    return TableReader(content_of(root, head), TABLE, ChunkCache(root, cache_bytes))


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data(), rows=st.integers(1, 60), ranks=st.sampled_from([1, 3]))
def test_rows_are_those_of_a_restore(data: st.DataObject, rows: int, ranks: int) -> None:
    chain = data.draw(random_parts(rows, CODECS))
    root = new_root()
    head = write_chain(root, rows, chain, ranks)
    wanted = Expected.of(root, head, [part.columns for part in chain[0]])
    reader = reader_of(root, head, data.draw(st.sampled_from([0, 1 << 20])))
    windows = [reader.window(*window) for window in data.draw(splits(rows))]
    assert same_bits(torch.cat([part.weight for part in windows]), wanted.weight)
    exp_avg = torch.cat([part.optimizer["exp_avg"] for part in windows])
    assert same_bits(exp_avg, wanted.exp_avg)
    momentum = torch.cat([part.optimizer["momentum1"] for part in windows])
    if len(chain[0]) == 1:
        assert same_bits(momentum, wanted.momentum1)
    torch.testing.assert_close(momentum, wanted.momentum1)
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
    some = reader.rows(ids)
    assert some.ids.tolist() == ids
    assert same_bits(some.weight, wanted.weight[ids])
    assert same_bits(some.optimizer["exp_avg"], wanted.exp_avg[ids])


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data(), rows=st.integers(1, 60))
def test_differences_are_those_of_the_restored_tables(data: st.DataObject, rows: int) -> None:
    chain = data.draw(random_parts(rows, CODECS))
    root = new_root()
    manifests: list[Manifest] = []
    for parts in chain:
        manifests.append(write(root, rows, parts, manifests[-1] if manifests else None))
    before, after = (data.draw(st.sampled_from(manifests)).id for _ in range(2))
    columns = [part.columns for part in chain[0]]
    old, new = Expected.of(root, before, columns), Expected.of(root, after, columns)
    found = compare(
        root.url,
        before,
        after,
        window_bytes=data.draw(st.sampled_from([1, 300, 1 << 20])),
        cache_bytes=data.draw(st.sampled_from([0, 1 << 20])),
    )
    (table,) = found.tables
    one, other = old.weight.double().numpy(), new.weight.double().numpy()
    changed = (old.weight.view(torch.int32) != new.weight.view(torch.int32)).any(dim=1).numpy()
    finite = changed & np.isfinite(one).all(axis=1) & np.isfinite(other).all(axis=1)
    assert table.changed_rows == changed.sum()
    assert table.not_finite == (changed & ~finite).sum()
    norms = np.linalg.norm(other[finite] - one[finite], axis=1)
    assert table.norm == pytest.approx(math.sqrt((norms**2).sum()))
    assert table.max_row_norm == pytest.approx(norms.max(initial=0.0))
    assert table.mean_row_norm == pytest.approx(norms.mean() if len(norms) else 0.0)
    own = np.linalg.norm(one[finite])
    assert table.relative == (pytest.approx(table.norm / own) if own else None)
    if before == after:
        assert (table.changed_rows, table.changed_states) == (0, 0)
    # `write` gives the state "model" the sequence number, and "rng" the same value always.
    assert found.dense_changed == (() if before == after else ("w",))
    assert found.dense_values == 2


def test_states_that_changed_are_counted() -> None:
    root = new_root()
    full = write(root, 40, [Part(WHOLE, list(range(40)), 10)])
    later = write(root, 40, [Part(WHOLE, [3, 17], 10)], full)
    (table,) = compare(root.url, full.id, later.id).tables
    assert (table.changed_rows, table.changed_states) == (2, 2)
    root = new_root()
    bare = write(root, 40, [Part(WHOLE, list(range(40)), 10, states=())])
    with_state = write(root, 40, [Part(WHOLE, [3, 17], 10)], bare)
    (table,) = compare(root.url, bare.id, with_state.id).tables
    assert (table.changed_rows, table.changed_states) == (2, 40)  # of another kind


def test_windows_share_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_root()
    full = write(root, 100, [Part(WHOLE, list(range(100)), 10)])
    later = write(root, 100, [Part(WHOLE, list(range(0, 100, 5)), 10)], full)
    read: list[str] = []

    def counting(root: Folder, chunk: StoredChunk, **_: object) -> memoryview:
        read.append(chunk.key)
        return read_chunks.read_chunk(root, chunk)

    monkeypatch.setattr(diff, "read_chunk", counting)
    compare(root.url, full.id, later.id, window_bytes=10 * (DIM * 4 + 4 + DIM * 4))
    assert len(read) == len(set(read)) == 12
    read.clear()
    # Rows from a common chunk can't differ where no other chunk holds a row.
    part = write(root, 100, [Part(WHOLE, [3], 10)], later)
    compare(root.url, later.id, part.id, window_bytes=10 * (DIM * 4 + 4 + DIM * 4))
    assert {key.split("/")[0] for key in read} == {full.id, later.id, part.id}
    assert len(read) == 3


def test_many_rows_take_no_more_than_their_number() -> None:
    root = new_root()
    head = write(root, 60_000, [Part(WHOLE, list(range(60_000)), 60_000, states=())])
    began = time.process_time()
    ids = list(reversed(range(60_000)))
    assert reader_of(root, head.id).rows(ids).ids.tolist() == ids
    assert time.process_time() - began < 10  # a quadratic loop took longer


def test_rows_that_are_the_same_take_no_time() -> None:
    root = new_root()
    full = write(root, 100_000, [Part(WHOLE, list(range(100_000)), 100_000, states=())])
    later = write(root, 100_000, [Part(WHOLE, [3, 99_000], 1, states=())], full)
    steps: list[int] = []

    def compared(after: str) -> int:
        steps.clear()
        found = compare(
            root.url,
            full.id,
            after,
            window_bytes=1,
            progress=lambda done, total: steps.append(done),
        )
        return found.tables[0].changed_rows

    assert compared(full.id) == 0
    assert steps == [100_000]
    assert compared(later.id) == 2
    assert steps == [4, 99_001, 100_000]


def test_memory_of_the_cache_is_bounded() -> None:
    root = new_root()
    head = write(root, 100, [Part(WHOLE, list(range(100)), 10)])
    chunks = content_of(root, head.id).chunks[0][:10]
    cache = ChunkCache(root, 3 * chunks[0].entry.length)
    for chunk in chunks:
        cache.read(chunk)
    assert len(cache._held) == 3
    assert cache._bytes == sum(map(len, cache._held.values()))


def test_tables_of_another_size_are_named() -> None:
    root, other = new_root(), new_root()
    small = write(root, 20, [Part(WHOLE, list(range(20)), 10)])
    large = write(other, 30, [Part(WHOLE, list(range(30)), 30)])
    moved = replace(large, id=checkpoint_id(7, 70, "00000007"), sequence=7).sealed()
    (root / moved.id).create()
    (root / moved.id).put(MANIFEST_NAME, moved.to_bytes())
    (file,) = moved.files
    (root / moved.id).put(file.name, (other / large.id).read(file.name))
    found = compare(root.url, small.id, moved.id)
    assert found.tables == ()
    assert found.reshaped == {TABLE: "20 × 8 float32 before, 30 × 8 float32 after"}


def test_tables_are_found_by_the_last_part_of_their_name() -> None:
    manifest = write(new_root(), 20, [Part(WHOLE, list(range(20)), 10)])
    tables = manifest.tables
    assert full_name("t", tables, manifest.id) == full_name(TABLE, tables, manifest.id) == TABLE
    with pytest.raises(IncompatibleCheckpoint, match=r"several tables 't': give one of a\.t, b\.t"):
        full_name("t", ["a.t", "b.t"], manifest.id)


class TestConsole:
    @pytest.fixture
    def root(self) -> Folder:
        root = new_root()
        encoding = TableEncoding(Rowwise(4))
        full = write(root, 50, [Part(WHOLE, list(range(50)), 20, encoding=encoding)], ranks=2)
        write(root, 50, [Part(WHOLE, [1, 5, 30], 20, encoding=encoding)], full, ranks=2)
        return root

    def ids(self, root: Folder) -> list[str]:
        return [name for name in root.names() if name.startswith("seq")]

    def test_cat_shows_rows_and_their_state(self, root: Folder, console: Console) -> None:
        wanted = Expected.of(root, self.ids(root)[-1], [WHOLE])
        found = console.json("cat", root, "--table", "t", "--rows", "5,1,40-41", "--optimizer")
        assert (found["table"], found["checkpoint"]) == (TABLE, self.ids(root)[-1])
        assert [row["row"] for row in found["rows"]] == [5, 1, 40, 41]
        for row in found["rows"]:
            weight = torch.tensor([float(value) for value in row["weight"]])
            assert same_bits(weight, wanted.weight[row["row"]])
            assert set(row) == {"row", "weight", *STATES}
            assert row["momentum1"] == float(wanted.momentum1[row["row"]])

    def test_cat_of_an_older_one_as_text(self, root: Folder, console: Console) -> None:
        older, newer = (Expected.of(root, id, [WHOLE]) for id in self.ids(root))
        assert not same_bits(older.weight[5], newer.weight[5])
        result = console.run("cat", root, self.ids(root)[0], "--table", TABLE, "--rows", 5)
        assert " ".join(f"{v:.6g}" for v in older.weight[5].tolist()) in result.out

    def test_values_that_json_lacks(self, root: Folder, console: Console) -> None:
        weight = Expected.of(root, self.ids(root)[-1], [WHOLE]).weight
        (infinite,) = weight.isinf().all(dim=1).nonzero()[0].tolist()
        found = console.json("cat", root, "--table", "t", "--rows", infinite)
        assert found["rows"][0]["weight"] == ["inf"] * DIM

    def test_diff_counts_changed_rows_and_values(self, root: Folder, console: Console) -> None:
        found = console.json("diff", root, *self.ids(root))
        assert [(t["table"], t["changed_rows"]) for t in found["tables"]] == [(TABLE, 3)]
        assert found["dense_changed"] == ["w"]
        assert found["dense_values"] == 3
        text = console.run("diff", root, *self.ids(root))
        assert f"{3 / 50:.1%}" in text.out
        assert "of 3 other values 1 changed: w" in text.out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--table", "u", "--rows", "1"], f"no table 'u': give one of {TABLE}"),
            (["--table", "t", "--rows", "3,50,77"], "has rows 0 to 49: there is no row 50, 77"),
            (["--table", "t", "--rows", "a"], "no list of row ids"),
            (["--table", "t", "--rows", "9-3"], "no list of row ids"),
            (["--table", "t"], "--rows"),
            (["seq-9", "--table", "t", "--rows", "1"], "no committed checkpoint 'seq-9'"),
        ],
    )
    def test_mistakes_are_named(
        self, root: Folder, console: Console, arguments: list[str], message: str
    ) -> None:
        result = console.run("cat", root, *arguments)
        assert result.code == 2
        assert message in " ".join(result.err.replace("│", " ").split())
        assert "Traceback" not in result.err
        assert not result.out

    def test_damage_is_named(self, console: Console) -> None:
        root = new_root()
        full = write(root, 20, [Part(WHOLE, list(range(20)), 20)])
        data = bytearray((root / full.id).read("rank-00000.bin"))
        data[40] ^= 1
        (root / full.id).put("rank-00000.bin", bytes(data))
        result = console.run("cat", root, "--table", "t", "--rows", 1)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("checknrun: ")
        assert f"/{full.id}/rank-00000.bin at offset 0" in result.err
        with pytest.raises(CorruptCheckpoint):
            reader_of(root, full.id).window(0, 20)
        assert console.run("diff", root, full.id, full.id).code == 0  # no row can differ
