"""A rank's saves of single rows between checkpoints leave none out that is still to be saved."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from tests.unit.tracked_model import TALL, make_model, only
from torchrec_checknrun.errors import CorruptCheckpoint, StorageFailed
from torchrec_checknrun.format.entries import RowsEntry
from torchrec_checknrun.format.rank_file import FOOTER, MAGIC, rank_file_name, write_rank_file
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.memory.partial import PrioritySaves
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers import priority_rows
from torchrec_checknrun.tiers.own_check import read_own_chunks
from torchrec_checknrun.tiers.priority_rows import PriorityRows, apply_saves
from torchrec_checknrun.tracking import track


@pytest.fixture
def tracked(group: None) -> Iterator[TrackedModel]:
    made = track(make_model())
    yield made
    made.close()


class Run:
    """A run that marks and saves rows of one table."""

    def __init__(self, tracked: TrackedModel, folder: Path, every_steps: int = 1) -> None:
        wanted = PrioritySaves(every_steps=every_steps, fraction=1.0)
        self.saves = PriorityRows(wanted, Folder(folder), 0, tracked)
        self.marks = only(tracked, TALL).marks
        self.made = Folder(folder) / ".priority"

    def step(self, number: int, *rows: int, head: str = "head") -> None:
        """Mark rows, and end a step; wait for what it saves."""
        self.marks.mark(torch.tensor(rows, dtype=torch.int64))
        self.saves.step(number, head, "run")
        if self.saves._running is not None:
            self.saves._running.exception()

    def saved(self) -> dict[str, list[int]]:
        """Return the rows of each save, by head and step."""
        found = {name: self.made / name for name in self.made.names()}
        return {
            f"{name.partition('.')[0]} {int(name[-8:])}": ids_in(folder)
            for name, folder in found.items()
            if folder.names()
        }


@pytest.fixture
def run(tracked: TrackedModel, tmp_path: Path) -> Iterator[Run]:
    made = Run(tracked, tmp_path)
    yield made
    made.saves.close(over=False)


def test_rows_of_a_save_that_failed_are_part_of_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageFailed(errno.ENOSPC, "no space left, says the test")

    run.saves.step(0, "head", "run")
    with monkeypatch.context() as patch:
        patch.setattr(priority_rows, "write_rank_file", fail)
        run.step(1, 1, 2)
    run.step(2, 3)
    run.step(3, 4)
    assert run.saved() == {"head 2": [1, 2, 3], "head 3": [4]}


def test_rows_of_a_checkpoint_that_failed_are_part_of_the_next(
    tracked: TrackedModel, tmp_path: Path
) -> None:
    run = Run(tracked, tmp_path, every_steps=2)
    run.saves.step(0, "head", "run")
    run.step(1, 1, 2)
    cut = tracked.cut(Consumer.LAST)
    run.marks.mark(torch.tensor([3]))
    tracked.merge(cut)
    run.step(2)
    assert run.saved() == {"head 2": [1, 2, 3]}
    run.saves.close(over=False)


def test_rows_saved_between_a_cut_and_its_commit_are_saved_again(
    tracked: TrackedModel, run: Run
) -> None:
    run.saves.step(0, "old", "run")
    run.step(1, 1, 2, head="old")
    cut = tracked.cut(Consumer.LAST)
    run.step(2, 3, head="old")
    assert run.saved() == {"old 1": [1, 2], "old 2": [3]}
    tracked.forget(cut)
    run.step(3, 4, head="new")
    assert run.saved()["new 3"] == [3, 4]


def test_a_replaced_run_leaves_those_of_the_run_that_has_replaced_it(
    tracked: TrackedModel, tmp_path: Path
) -> None:
    """Come back, and not know of that until the next checkpoint."""
    root, wanted = Folder(tmp_path), PrioritySaves(every_steps=1, fraction=1.0)
    heads = [f"seq-00000{number}_step-00000010_0000000{number}" for number in (1, 2, 3)]
    marks = only(tracked, TALL).marks

    def save(saves: PriorityRows, head: str, run: str, step: int) -> None:
        tracked.forget(tracked.cut(Consumer.LAST))  # by the head
        saves.step(step - 1, head, run)
        marks.mark(torch.tensor([step]))
        saves.step(step, head, run)
        saves._worker.submit(lambda: None).result()

    replaced, other = (PriorityRows(wanted, root, 0, tracked) for _ in range(2))
    save(replaced, heads[0], "replaced", 11)
    save(other, heads[2], "other", 12)  # and what was of older checkpoints goes
    made = root / ".priority"
    theirs = f"{heads[2]}.other.step-00000012"
    assert made.names() == [theirs]
    save(replaced, heads[1], "replaced", 13)
    assert made.names() == [f"{heads[1]}.replaced.step-00000013", theirs]
    assert ids_in(made / theirs) == [12]
    replaced.close(over=True)
    assert made.names() == [theirs]
    other.close(over=True)
    assert root.names() == []


def ids_in(folder: Folder) -> list[int]:
    found = []
    for entry, header, payload in read_own_chunks(folder, rank_file_name(0)):
        if isinstance(entry, RowsEntry) and isinstance(header, RowsHeader):
            found += StoredRows(header, payload).ids.tolist()
    return sorted(found)


@pytest.mark.parametrize("head", ["seq-000001_step-00000010_00000001", "v1.0", "a.step-7.b"])
def test_a_directorys_name_is_told_apart(head: str) -> None:
    """Try a user's own names of checkpoints as well: their saves would be deleted at once."""
    run = "0123456789abcdef" * 2
    name = priority_rows.directory_of(head, run, 12)
    assert priority_rows.parse_directory(name) == (head, run[:16], 12)


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b"[" * 100_000, b'{"chunks":5}'])
def test_an_index_that_is_none(index: bytes, tmp_path: Path) -> None:
    checksum = xxhash.xxh3_64_hexdigest(index).encode()
    content = index + FOOTER.pack(0, len(index), checksum, MAGIC)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        [*read_own_chunks(Folder(tmp_path), "file")]


def test_rows_that_cannot_be_decoded_stay_older(
    tracked: TrackedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Go on with a recovery in which a faulty writer has taken part."""
    root, run = Folder(tmp_path), "run"
    shard = only(tracked, TALL)
    (chunk,) = priority_rows._chunks(shard.local, torch.tensor([1, 2]))
    encoded = chunk.encode()
    entry = encoded.entry
    assert isinstance(entry, RowsEntry)
    ids = msgspec.structs.replace(entry.ids, encoding="unknown")
    encoded.entry = msgspec.structs.replace(entry, ids=ids)
    folder = root / ".priority" / priority_rows.directory_of("head", run, 3)
    folder.create()
    write_rank_file(folder, 0, iter([encoded]))
    assert apply_saves(root, "head", run, 5, 0, [shard]) == 0
    assert "a priority save can't be used, older rows stay" in caplog.text


@pytest.mark.parametrize("over", [False, True])
def test_a_store_that_hangs_keeps_no_process(
    over: bool, tracked: TrackedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use daemons: the interpreter waits for all other threads, however long they take."""
    root, hangs = Folder(tmp_path, timeout_seconds=0.5), threading.Event()
    saves = PriorityRows(PrioritySaves(every_steps=1, fraction=1.0), root, 0, tracked)
    monkeypatch.setattr(priority_rows, "write_rank_file", lambda *_: hangs.wait(60))
    saves.step(0, "head", "run")
    only(tracked, TALL).marks.mark(torch.tensor([1]))
    try:
        saves.step(1, "head", "run")
        began = time.monotonic()
        saves.close(over)
        assert time.monotonic() - began < 10
        own = [t for t in threading.enumerate() if t.name.startswith("checknrun-priority")]
        assert own
        assert all(thread.daemon for thread in own)
    finally:
        hangs.set()


def test_a_publication_takes_no_rows_from_the_next(tracked: TrackedModel, tmp_path: Path) -> None:
    root = Folder(tmp_path)
    saves = PriorityRows(PrioritySaves(every_steps=2, fraction=1.0), root, 0, tracked)
    marks = only(tracked, TALL).marks
    saves.step(0, "head", "run")
    marks.mark(torch.tensor([1, 2]))
    tracked.forget(tracked.cut(Consumer.PUBLISHED))
    marks.mark(torch.tensor([3]))
    saves.step(2, "head", "run")
    assert saves._running is not None
    saves._running.exception()
    assert ids_in(root / ".priority" / "head.run.step-00000002") == [1, 2, 3]
    saves.close(over=False)
