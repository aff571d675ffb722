"""Small chunks that lie side by side are read in one request, and verified one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.chains import (
    DIM,
    TABLE,
    Part,
    apply_in_order,
    content_of,
    make_shards,
    new_root,
    random_parts,
    same_bits,
    write,
    write_chain,
)
from tests.unit.compaction.compacted import WHOLE, flip
from tests.unit.serve.served import Job, Net, differences, restored
from torchrec_checknrun import Follower, compact
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.reader import Read, StoredChunk, coalesced_reads, read_chunk
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.restore import chunks as chunks_of_chain
from torchrec_checknrun.restore.chunks import ReadableChunk, read_chunks
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.rows import RowRestore
from torchrec_checknrun.root.chain import newest_required
from torchrec_checknrun.serve.publish import publish
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.store import coalescing
from torchrec_checknrun.store.coalescing import Place, coalesced
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tools.export import export_dcp
from torchrec_checknrun.tools.verify import verify


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that are read from stores in memory from now on."""
    found: list[str] = []
    read = MemoryFileSystem.cat_file

    def counted(self: Any, path: str, *args: Any, **options: Any) -> Any:
        found.append(path)
        return read(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return found


def row_chunks(root: Folder, head: str) -> list[StoredChunk]:
    parts = content_of(root, head).chunks
    return [c for part in parts for c in part if isinstance(c.entry, RowsEntry)]


def reader(root: Folder, chunks: list[StoredChunk]) -> Read:
    return partial(read_chunk, root, at_hand=coalesced_reads(root, chunks).part)


def load(root: Folder, head: str, shards: list[LocalShard]) -> None:
    """Restore as a rank does."""
    content = content_of(root, head)
    rows = RowRestore(content, {TABLE: TABLE}, Fit())
    marks = [Marks(shard.rectangle.rows, torch.device("cpu")) for shard in shards]
    chunks = {chunk.key: chunk for part in content.chunks for chunk in part}
    keys = rows.plan(shards, marks)

    def one(chunk: ReadableChunk) -> None:
        rows.load(chunk, dry_run=False)

    read_chunks(root, [chunks[key] for key in keys], one)
    rows.finish(dry_run=False)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.data(),
    st.integers(1, 60),
    st.integers(1, 3),
    st.sampled_from([1, 300, 2000, coalescing.RUN_BYTES]),
)
def test_random_chains_restore_alike(data: st.DataObject, rows: int, ranks: int, most: int) -> None:
    root, chain = new_root(), data.draw(random_parts(rows))
    head = write_chain(root, rows, chain, ranks)
    places = [Rectangle(0, rows, *part.columns) for part in chain[0]]
    found, wanted = make_shards(rows, places), make_shards(rows, places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_of_chain, "RUN_BYTES", most)
        patch.setattr(os, "sched_getaffinity", lambda _: range(3))
        load(root, head, found)
    apply_in_order(root, head, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(map(same_bits, one.tensors, other.tensors))


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3000))
def test_groups_lie_side_by_side(data: st.DataObject, ranks: int, most: int) -> None:
    root = new_root()
    head = write_chain(root, 50, data.draw(random_parts(50)), ranks)
    wanted = row_chunks(root, head)
    chosen = [chunk for chunk in wanted if data.draw(st.booleans())]
    runs = coalesced(chosen, most)
    assert [chunk for run in runs for chunk in run.parts] == chosen
    for run in runs:
        assert len({(chunk.checkpoint, chunk.file) for chunk in run.parts}) == 1
        assert len(run.parts) == 1 or run.size <= most
        ends = 0
        for chunk in run.parts:
            assert chunk.entry.offset >= ends
            ends = chunk.entry.offset + chunk.entry.length


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from([0, 500, 5000, 1 << 20]), st.booleans())
def test_any_order_gives_what_was_written(
    data: st.DataObject, ranks: int, most: int, ahead: bool
) -> None:
    root = new_root()
    head = write_chain(root, 50, data.draw(random_parts(50)), ranks)
    chunks = [chunk for part in content_of(root, head).chunks for chunk in part]
    reads = coalesced_reads(root, chunks, most, ahead)
    assert not ahead or most < 1 << 20 or len(reads._held) > 0
    for chunk in data.draw(st.permutations(chunks)):
        assert read_chunk(root, chunk, at_hand=reads.part) == read_chunk(root, chunk)
        held = sum(reads._runs[key].size for key in reads._held)
        assert held <= most or len(reads._held) == 1
        assert reads._left == most - held


def many_chunks(root: Folder) -> str:
    full = write(root, 400, [Part(WHOLE, list(range(400)), 4)])
    return write(root, 400, [Part(WHOLE, list(range(0, 400, 2)), 2)], full).id


@pytest.mark.parametrize("name", ["restore", "ahead", "backwards", "verify", "compact", "diff"])
def test_requests_do_not_grow_with_chunks(name: str, requests: list[str]) -> None:
    root = new_root()
    head = many_chunks(root)
    chunks = row_chunks(root, head)
    assert len(chunks) == 200
    read = reader(root, chunks)
    acts: dict[str, Callable[[], object]] = {
        "restore": lambda: load(root, head, make_shards(400, [Rectangle(0, 400, 0, DIM)])),
        "ahead": lambda: list(map(read, chunks)),
        "backwards": lambda: list(map(read, reversed(chunks))),
        "verify": lambda: verify(root.url),
        "compact": lambda: compact(root.url),
        "diff": lambda: compare(root.url, chunks[0].checkpoint, head),
    }
    requests.clear()
    acts[name]()
    assert 2 <= len([path for path in requests if "/rank" in path]) <= 12


def test_each_thread_of_a_restore_has_a_request(
    requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_root()
    head = write(root, 400, [Part(WHOLE, list(range(400)), 4)]).id
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    requests.clear()
    load(root, head, make_shards(400, [Rectangle(0, 400, 0, DIM)]))
    assert 6 <= len([path for path in requests if "/rank" in path]) <= 12


@pytest.mark.usefixtures("one_rank")
def test_requests_do_not_grow_with_a_models_chunks(requests: list[str], tmp_path: Path) -> None:
    root = new_root()
    job = Job(root.url, rows=2000)
    for seed in range(3):
        job.train(seed, samples=300)
        job.saver.save()
    job.saver.close()
    assert len(row_chunks(root, newest_required(root).head.id)) > 300
    follower = Follower(root.url, Net(rows=2000))

    def reads(act: Callable[[], object]) -> int:
        requests.clear()
        act()
        return len([path for path in requests if "/rank" in path])

    again: list[Net] = []
    assert reads(lambda: again.append(restored(root.url, rows=2000))) <= 15
    assert reads(follower.poll) <= 15
    assert not differences(follower, again[0].eval())
    assert reads(lambda: publish(root.url, tmp_path / "published")) <= 15
    chain = newest_required(root)
    assert reads(lambda: export_dcp(root, chain, str(tmp_path / "exported"))) <= 15


@pytest.mark.usefixtures("one_rank")
def test_requests_of_a_follower_do_not_grow_with_the_chain(requests: list[str]) -> None:
    root = new_root()
    job, follower, polls = Job(root.url), Follower(root.url, Net()), []
    for seed in range(8):
        job.train(seed)
        job.saver.save()
        requests.clear()
        assert follower.poll() is not None
        polls.append(len(requests))
    job.saver.close()
    assert len(newest_required(root).manifests) == 8
    assert not differences(follower, restored(root.url).eval())
    assert polls[1] == polls[-1], polls


@contextmanager
def spoilt_answers(wrong: Callable[[], bool]) -> Iterator[None]:
    """Spoil what the storage answers."""
    read = Folder.read_into

    def spoilt(self: Folder, memory: memoryview, name: str, offset: int) -> int:
        count = read(self, memory, name, offset)
        if wrong():
            np.frombuffer(memory, np.uint8)[count // 2] ^= 1
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "read_into", spoilt)
        yield


@pytest.mark.parametrize("way", ["restore", "ahead"])
def test_an_answer_that_was_spoilt_on_its_way_is_asked_for_again(way: str) -> None:
    root = new_root()
    head = many_chunks(root)
    chunks, lock, times = row_chunks(root, head), threading.Lock(), 0

    def first() -> bool:
        nonlocal times
        with lock:
            times += 1
            return times == 1

    wanted = [bytes(read_chunk(root, chunk)) for chunk in chunks]
    found: dict[str, bytes] = {}

    def keep(chunk: ReadableChunk) -> None:
        found[chunk.stored.key] = bytes(chunk.payload())

    read = reader(root, chunks)
    with spoilt_answers(first):
        if way == "restore":
            read_chunks(root, chunks, keep)
        else:
            found = {chunk.key: bytes(read(chunk)) for chunk in chunks}
    assert [found[chunk.key] for chunk in chunks] == wanted
    assert times >= 2


@pytest.mark.parametrize("way", ["restore", "ahead"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_named_by_chunk(way: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_root()
    head = many_chunks(root)
    chunks = row_chunks(root, head)
    hit = chunks[150]
    folder = root / hit.checkpoint
    if damage == "flipped":
        flip(root, hit.checkpoint, hit.file, hit.entry.offset)
    else:
        data = folder.read(hit.file)
        folder.delete(hit.file)
        if damage == "cut":
            folder.put(hit.file, data[: hit.entry.offset + 1])
    memory, _, *others = read_chunk.__defaults__ or ()
    monkeypatch.setattr(read_chunk, "__defaults__", (memory, 0.0, *others))
    read = reader(root, chunks)

    def act() -> None:
        if way == "restore":
            read_chunks(root, chunks, lambda chunk: chunk.payload())
        for chunk in chunks:
            read(chunk)

    words = f"{hit.file} is missing" if damage == "missing" else f"at offset {hit.entry.offset}: "
    with pytest.raises(CorruptCheckpoint, match=words):
        act()


def test_parts_join_only_behind_one_another() -> None:
    def part(offset: int, length: int, file: str = "a") -> Any:
        return SimpleNamespace(place=Place("folder", file, offset, length))

    def lengths(*parts: Any, most: int = 1 << 20) -> list[int]:
        return [len(run.parts) for run in coalesced(parts, most)]

    gap = 64 << 10
    assert lengths(part(0, 5), part(5, 5), part(10, 0)) == [3]
    assert lengths(part(0, 5), part(5 + gap, 5)) == [2]
    assert lengths(part(0, 5), part(6 + gap, 5)) == [1, 1]
    assert lengths(part(5, 5), part(0, 5)) == [1, 1]  # backwards
    assert lengths(part(0, 5), part(3, 5)) == [1, 1]  # overlapping
    assert lengths(part(0, 5), part(5, 5, "b")) == [1, 1]
    assert lengths(part(0, 5), part(5, 5), part(10, 5), most=10) == [2, 1]
    assert lengths(part(0, 50), part(50, 50), most=10) == [1, 1]
    assert lengths() == []
