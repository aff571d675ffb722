"""Restore the newest version of rows: the same newest first, in order, and on several threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    marked,
    new_root,
    random_parts,
    restore,
    same_bits,
    splits,
    write,
    write_chain,
)
from tests.unit.entries import fields
from torchrec_checknrun.codecs import KMeans, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("small_operations")


@pytest.fixture
def root(memory_root: Folder) -> Folder:
    return memory_root


def assert_same(shards: list[LocalShard], wanted: list[LocalShard]) -> None:
    for shard, plain in zip(shards, wanted, strict=True):
        assert same_bits(shard.weight, plain.weight), shard
        for name, state in shard.optimizer.items():
            assert same_bits(state, plain.optimizer[name]), (shard, name)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), rows=st.integers(1, 60), threads=st.sampled_from([1, 1, 3]))
def test_random_chains_restore_as_read_in_order(
    data: st.DataObject, rows: int, threads: int
) -> None:
    chain = data.draw(random_parts(rows, CODECS))
    root, columns = new_root(), [part.columns for part in chain[0]]
    head = write_chain(root, rows, chain)
    ranges = data.draw(splits(rows))
    places = [Rectangle(*of_rows, *of_columns) for of_rows in ranges for of_columns in columns]
    shards, wanted = make_shards(rows, places), make_shards(rows, places)
    held = apply_in_order(root, head, wanted)
    marks, _ = restore(root, head, shards, threads)
    assert_same(shards, wanted)
    for of_shard, plain in zip(marks, held, strict=True):
        assert (marked(of_shard) == plain).all()


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), rows=st.integers(1, 40), threads=st.sampled_from([1, 3]))
def test_random_chains_into_other_columns(data: st.DataObject, rows: int, threads: int) -> None:
    chain = data.draw(random_parts(rows))
    for part in itertools.chain(*chain):
        part.states = ("exp_avg",) if part.states else ()
    root = new_root()
    head = write_chain(root, rows, chain)
    places = [Rectangle(0, rows, *columns) for columns in data.draw(splits(DIM))]
    shards, wanted = make_shards(rows, places), make_shards(rows, places)
    for shard in (*shards, *wanted):
        shard.optimizer = {"exp_avg": shard.optimizer["exp_avg"]}
    held = apply_in_order(root, head, wanted)
    marks, _ = restore(root, head, shards, threads)
    assert_same(shards, wanted)
    for of_shard, plain in zip(marks, held, strict=True):
        assert (marked(of_shard) == plain).all()


@pytest.mark.parametrize("columns", [[(0, DIM)], [(0, 1), (1, DIM)]], ids=["as stored", "others"])
def test_threads_claim_and_mark_rows_one_at_a_time(
    root: Folder, monkeypatch: pytest.MonkeyPatch, columns: list[tuple[int, int]]
) -> None:
    """Bits of eight rows share a byte, and one chunk's last row has the next one's first beside."""
    calls, busy = Counter[str](), threading.Lock()

    def alone(kind: type, name: str) -> None:
        plainly = getattr(kind, name)

        def watched(*given: Any) -> Any:
            assert busy.acquire(blocking=False), "two threads at once"
            try:
                time.sleep(0.002)
                return plainly(*given)
            finally:
                calls[kind.__name__] += 1
                busy.release()

        monkeypatch.setattr(kind, name, watched)

    every = list(range(60))
    chain = [[Part((0, DIM), every, 5, states=())], [Part((0, DIM), every[::2], 3, states=())]]
    head = write_chain(root, 60, chain)
    places = [Rectangle(0, 60, *of_columns) for of_columns in columns]
    shards, wanted = make_shards(60, places), make_shards(60, places)
    for shard in (*shards, *wanted):
        shard.optimizer = {}
    held = apply_in_order(root, head, wanted)
    alone(DoneRows, "add")
    alone(Marks, "add")
    marks, _ = restore(root, head, shards, threads=4)
    assert calls
    assert_same(shards, wanted)
    assert [marked(each).tolist() for each in marks] == [each.tolist() for each in held]


def test_state_that_newer_rows_lack_is_the_older_ones(root: Folder) -> None:
    """Keep the state of an optimizer that was dropped between two checkpoints."""
    whole = (0, DIM)
    chain = [[Part(whole, list(range(20)), 7)], [Part(whole, [3, 4, 9], 9, states=())]]
    head = write_chain(root, 20, chain)
    shards, wanted = (make_shards(20, [Rectangle(0, 20, *whole)]) for _ in range(2))
    apply_in_order(root, head, wanted)
    restore(root, head, shards)
    assert_same(shards, wanted)
    assert bool((shards[0].optimizer["momentum1"] >= 0).all())


def test_superseded_chunks_are_not_read(root: Folder) -> None:
    whole = (0, DIM)
    chain = [
        [Part(whole, list(range(100)), 10)],
        [Part(whole, [5, 15, 25, 31, 39], 2)],
        [Part(whole, list(range(20, 45)), 5)],
    ]
    head = write_chain(root, 100, chain)
    shards, wanted = (make_shards(100, [Rectangle(0, 100, *whole)]) for _ in range(2))
    held = apply_in_order(root, head, wanted)
    marks, were_read = restore(root, head, shards)
    assert_same(shards, wanted)
    assert (marked(marks[0]) == held[0]).all()
    newest, middle, baseline = (
        [key for key in were_read if key.startswith(f"seq-00000{n}")] for n in (3, 2, 1)
    )
    assert were_read == newest + middle + baseline
    # Rows 5 and 15; newer checkpoints hold all rows of 25 and 31, of 39, and of the ranges 20 to
    # 39.
    assert [len(newest), len(middle), len(baseline)] == [5, 1, 8]
    _, every = restore(root, head, make_shards(100, [Rectangle(0, 100, *whole)]), dry_run=True)
    assert len(every) == 10 + 3 + 5


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_chunk_is_named(root: Folder, threads: int, verify: bool) -> None:
    """Name the first of several damaged chunks in reading order, however many threads read."""
    chain = [[Part((0, DIM), list(range(100)), 4)], [Part((0, DIM), list(range(0, 100, 9)), 3)]]
    head = write_chain(root, 100, chain)
    damaged = [c for c in content_of(root, head).chunks[0] if fields(c)["kind"] == "rows"][7:9]
    filesystem, path = fsspec.core.url_to_fs(f"{root.url}/{damaged[0].checkpoint}")
    data = bytearray(filesystem.cat_file(f"{path}/{damaged[0].file}"))
    for chunk in damaged:
        data[chunk.entry.offset + 5] ^= 1
    filesystem.pipe_file(f"{path}/{damaged[0].file}", bytes(data))
    shards = make_shards(100, [Rectangle(0, 100, 0, DIM)])
    where = f"{damaged[0].checkpoint}/{damaged[0].file} at offset {damaged[0].entry.offset}:"
    with pytest.raises(CorruptCheckpoint, match=where):
        restore(root, head, shards, threads, dry_run=verify)
    assert bool((shards[0].weight == -1).all()) == verify


def test_another_ranks_rows_do_not_count(root: Folder) -> None:
    """Skip a chunk if all of this rank's rows are restored, whatever other rows the chunk has."""
    chain = [[Part((0, DIM), list(range(40)), 40)], [Part((0, DIM), list(range(10)), 10)]]
    head = write_chain(root, 40, chain)
    for place, count in ((Rectangle(0, 10, 0, DIM), 1), (Rectangle(5, 11, 0, DIM), 2)):
        shards, wanted = (make_shards(40, [place]) for _ in range(2))
        apply_in_order(root, head, wanted)
        assert len(restore(root, head, shards)[1]) == count
        assert_same(shards, wanted)


@pytest.mark.parametrize("dry_run", [True, False])
def test_rows_that_nothing_holds(root: Folder, dry_run: bool) -> None:
    """Count the rows of chunks with gaps, which compaction makes, when the chunks are read."""
    ids = [i for i in range(20) if i != 7]
    for more, columns in (([20], (0, DIM)), ([], (0, DIM // 2)), ([], (DIM // 2, DIM))):
        parts = [Part((0, DIM), [*ids, *more], 30), Part((0, DIM), list(range(20, 30)), 10)]
        for part in parts:
            part.states = ("exp_avg",)
        manifest = write(root, 30, parts)
        shards = make_shards(30, [Rectangle(5, 25, *columns)])
        shards[0].optimizer = {"exp_avg": shards[0].optimizer["exp_avg"]}
        with pytest.raises(CorruptCheckpoint, match=rf"{manifest.id} is not full"):
            restore(root, manifest.id, shards, dry_run=dry_run)


def test_a_full_checkpoint_that_can_not_be_full(root: Folder) -> None:
    manifest = write(root, 30, [Part((0, DIM), list(range(0, 30, 2)), 30)])
    shards = make_shards(30, [Rectangle(0, 30, 0, DIM)])
    with pytest.raises(CorruptCheckpoint, match=r"holds 120 of the 240 values"):
        restore(root, manifest.id, shards)
    assert bool((shards[0].weight == -1).all())


class TestHowRowsAreWritten:
    """Write into unusual kinds of memory."""

    PARTS = (
        [Part((0, DIM), list(range(50)), 20, encoding=TableEncoding(Rowwise(4), "log8"))],
        [Part((0, DIM), list(range(3, 50, 4)), 7)],
        [Part((0, DIM), list(range(11, 29)), 50, encoding=TableEncoding(KMeans(2, block_rows=5)))],
    )

    def check(self, root: Folder, shards: list[LocalShard]) -> None:
        head = write_chain(root, 50, self.PARTS)
        wanted = make_shards(50, [Rectangle(0, 50, 0, DIM)])
        apply_in_order(root, head, wanted)
        restore(root, head, shards)
        for shard, plain in zip(shards, wanted, strict=True):
            assert torch.equal(shard.weight, plain.weight)
            for name in STATES:
                assert torch.equal(shard.optimizer[name].float(), plain.optimizer[name])

    def test_memory_with_gaps(self, root: Folder) -> None:
        shards = make_shards(50, [Rectangle(0, 50, 0, DIM)])
        shards[0].weight = torch.full((50, 2 * DIM), -1.0)[:, ::2]
        shards[0].optimizer = {
            "momentum1": torch.full((100,), -1.0)[::2],
            "exp_avg": torch.full((50, DIM + 1), -1.0)[:, 1:],
        }
        self.check(root, shards)

    def test_state_of_a_wider_type(self, root: Folder) -> None:
        shards = make_shards(50, [Rectangle(0, 50, 0, DIM)])
        shards[0].optimizer = {n: s.double() for n, s in shards[0].optimizer.items()}
        self.check(root, shards)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.sampled_from([1, 7, 8, 100, 1000]),
    data=st.data(),
    block=st.sampled_from([8, 64, 1 << 18]),
    compiled=st.booleans(),
)
def test_done_rows_equal_plain_indexing(
    rows: int, data: st.DataObject, block: int, compiled: bool
) -> None:
    compiled = compiled and has_extension()
    done, plain = DoneRows(rows), np.zeros(rows, dtype=bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_checknrun.row_sets._DONE_BLOCK", block)
        patch.setattr("torchrec_checknrun.row_sets._BLOCK", block)
        patch.setattr("torchrec_checknrun.row_sets.has_extension", lambda: compiled)
        for _ in range(4):
            if data.draw(st.booleans()):
                start = data.draw(st.integers(0, rows))
                ids = np.arange(start, data.draw(st.integers(start, rows)))
            else:
                ids = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1)))), dtype=np.int64)
            new, wanted = done.add(ids), np.flatnonzero(~plain[ids])
            assert (np.arange(len(ids)) if new is None else new).tolist() == wanted.tolist()
            assert (new is None) == (len(wanted) == len(ids))
            plain[ids] = True
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2)))
            assert done.contains_range(start, stop) == bool(plain[start:stop].all())
    assert len(done) == plain.sum()
    assert done.positions(0, rows).tolist() == np.flatnonzero(plain).tolist()


def test_the_chains_are_not_trivial(root: Folder) -> None:
    """Find random rows, and rows stored exactly among encoded ones, by the plain reader."""
    part = Part((0, DIM), list(range(60)), 60, encoding=TableEncoding(Rowwise(4)))
    head = write_chain(root, 60, [[part]])
    (chunk,) = [c for c in content_of(root, head).chunks[0] if fields(c)["kind"] == "rows"]
    assert fields(chunk)["table"] == TABLE
    assert 0 < fields(chunk)["weight"]["exceptions"]["rows"] < 10
