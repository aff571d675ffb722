"""Use planners and storage through ``dcp.save`` and ``dcp.load`` in one process without a group."""

import os
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.unit.plain_states import Counter, cause, example, load, save
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import CheckpointExists, CheckpointNotFound, InvalidPlan
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder


def test_content_comes_back(root: Folder) -> None:
    manifest = save(root, "first", example(5.0))
    assert read_manifest(root, "first") == manifest
    assert (manifest.id, manifest.kind, manifest.sequence) == ("first", "full", 1)
    live = example(0.0)
    weight, step, counter = live["weight"], live["optimizer"][0]["step"], live["counter"]
    load(root, "first", live)
    assert live["weight"] is weight
    assert weight.tolist() == [[5.0] * 4] * 3
    assert live["optimizer"][0]["step"] is step
    assert float(step) == 5
    assert live["optimizer"]["lr"] == 5.0
    assert live["optimizer"]["names"] == ["a", "b"]
    assert live["rng"].tolist() == [5, 5, 5]
    assert live["counter"] is counter
    assert counter.value == 5


def test_states_without_payload_stay_apart(root: Folder) -> None:
    """Keep states of numbers apart, whose chunks are empty and so begin at the same offset."""
    names = ["a", "b", "c", "d"]
    save(root, "first", {name: Counter(i) for i, name in enumerate(names)})
    live = {name: Counter(-1) for name in reversed(names)}
    load(root, "first", live)
    assert {name: counter.value for name, counter in live.items()} == {
        "a": 0,
        "b": 1,
        "c": 2,
        "d": 3,
    }


def test_a_part_can_be_loaded(root: Folder) -> None:
    save(root, "first", example(5.0))
    live = {"counter": Counter(0)}
    load(root, "first", live)
    assert live["counter"].value == 5


def test_an_empty_state(root: Folder) -> None:
    manifest = save(root, "first", {})
    assert manifest.states == {}
    load(root, "first", {})


def test_a_directory_is_written_once(root: Folder) -> None:
    first = save(root, "first", example(1.0))
    error = cause(lambda: save(root, "first", example(2.0)))
    assert isinstance(error, CheckpointExists)
    assert "first already holds" in str(error)
    assert read_manifest(root, "first") == first
    live = example(0.0)
    load(root, "first", live)
    assert live["counter"].value == 1


def test_a_directory_with_anything_in_it_is_not_used(disk: Folder) -> None:
    (disk / "first").create()
    (disk / "first").put("notes.txt", b"x")
    error = cause(lambda: save(disk, "first", example()))
    assert isinstance(error, CheckpointExists)
    assert "notes.txt" in str(error)
    assert (disk / "first").names() == ["notes.txt"]


@pytest.mark.parametrize("name", ["a\\b", "x" * 256, "tab\t"])
def test_a_name_that_could_not_be_read_again_is_not_written(disk: Folder, name: str) -> None:
    error = cause(lambda: save(disk, name, example()))
    assert isinstance(error, InvalidPlan)
    assert repr(name) in str(error)
    assert disk.names() == []


@pytest.mark.parametrize("name", ["step 10", "2024-02-03T10:00:00", "größe", ".hidden"])
def test_names_of_users(disk: Folder, name: str) -> None:
    save(disk, name, example(3.0))
    live = example(0.0)
    load(disk, name, live)
    assert live["counter"].value == 3


def test_sequences_go_on(root: Folder) -> None:
    assert [save(root, name, example()).sequence for name in ("b", "a", "c")] == [1, 2, 3]


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = StorageWriter("runs/first")
    reader = StorageReader("runs/first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    dcp.save(example(4.0), storage_writer=writer, planner=SavePlanner(), no_dist=True)
    live = example(0.0)
    dcp.load(live, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    assert live["counter"].value == 4
    assert (tmp_path / "runs" / "first" / MANIFEST_NAME).is_file()


def test_checkpoint_id_chooses_the_directory(disk: Folder) -> None:
    """Use a writer and a reader again: DCP's ``checkpoint_id`` sets the directory."""
    writer, reader = StorageWriter(disk.url), StorageReader(disk.url)
    for name, fill in (("one", 1.0), ("two", 2.0)):
        dcp.save(
            example(fill),
            checkpoint_id=(disk / name).url,
            storage_writer=writer,
            planner=SavePlanner(),
            no_dist=True,
        )
    for name, fill in (("one", 1), ("two", 2), ("one", 1)):
        live = example(0.0)
        dcp.load(
            live,
            checkpoint_id=(disk / name).url,
            storage_reader=reader,
            planner=LoadPlanner(),
            no_dist=True,
        )
        assert live["counter"].value == fill


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["fsync", "link"])
def test_a_failed_save_is_no_checkpoint(
    disk: Folder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first = save(disk, "first", example(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(os, what, fail)
        assert isinstance(cause(lambda: save(disk, "second", example(2.0))), OSError)
    assert MANIFEST_NAME not in (disk / "second").names()
    assert isinstance(cause(lambda: load(disk, "second", example())), CheckpointNotFound)
    third = save(disk, "third", example(3.0))
    assert third.sequence == first.sequence + 1
