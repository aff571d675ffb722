"""Planners and storage through ``dcp.save`` and ``dcp.load`` in one process, without a group."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_checknrun import LoadPlanner, Quantization, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.blocks import BlockSummary
from torchrec_checknrun.chain import read_manifest, resolve
from torchrec_checknrun.chunks import decode_state_chunk
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    InvalidPlan,
    UnsupportedState,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.manifest import MANIFEST_NAME, Header, Link, Manifest
from torchrec_checknrun.read_chunks import read_chunk, read_content, read_indexes
from torchrec_checknrun.report import Progress, checkpoint_report
from torchrec_checknrun.row_set import RowSet
from torchrec_checknrun.save_items import Items
from torchrec_checknrun.save_plan import (
    CheckpointPlanner,
    GlobalPlan,
    PlanSummary,
    Prepared,
    summarize,
)
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.stored_rows import decode_rows

State = dict[str, Any]


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "disk":
        yield Folder(tmp_path / "my runs")
        return
    folder = Folder("memory://tests/storage/run")
    folder.create()
    yield folder
    fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture
def disk(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


class Counter:
    """A Stateful, as DCP knows them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> State:
        return {"value": self.value}

    def load_state_dict(self, state_dict: State) -> None:
        self.value = state_dict["value"]


def example(fill: float = 1.0) -> State:
    return {
        "weight": torch.full((3, 4), fill),
        "optimizer": {0: {"step": torch.tensor(fill)}, "lr": fill, "names": ["a", "b"]},
        "rng": np.full(3, int(fill)),
        "counter": Counter(int(fill)),
        "nothing": {},
    }


def save(
    root: Folder, name: str, state: State, planner: CheckpointPlanner | None = None
) -> Manifest:
    metadata = dcp.save(
        state,
        storage_writer=StorageWriter((root / name).url),
        planner=planner or SavePlanner(),
        no_dist=True,
    )
    manifest = metadata.planner_data
    assert isinstance(manifest, Manifest)
    return manifest


def load(root: Folder, name: str, state: State) -> None:
    dcp.load(
        state,
        storage_reader=StorageReader((root / name).url),
        planner=LoadPlanner(),
        no_dist=True,
    )


def cause(act: Callable[[], object]) -> Exception:
    """The error that made DCP fail."""
    with pytest.raises(CheckpointException) as raised:
        act()
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, Exception)
    assert type(error).__name__ in str(raised.value)
    assert str(error) in str(raised.value)
    return error


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
    """Numbers stand in the index: chunks of several such states begin at the same offset."""
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
    """DCP's own way to say where: writer and reader can be used again."""
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


class TestPartnersThatDontFit:
    """This package's planners and storage need each other: anything else is named, not guessed."""

    def test_dcps_planner_with_our_writer(self, disk: Folder) -> None:
        error = cause(
            lambda: dcp.save(
                {"w": torch.ones(2)},
                storage_writer=StorageWriter((disk / "first").url),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "planner=SavePlanner()" in str(error)
        assert MANIFEST_NAME not in (disk / "first").names()

    def test_our_planner_with_dcps_writer(self, disk: Folder) -> None:
        """It would write, but without the index that says what the bytes are."""
        error = cause(
            lambda: dcp.save(
                example(),
                checkpoint_id=(disk / "first").url,
                planner=SavePlanner(),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "storage_writer=StorageWriter(path)" in str(error)

    @pytest.mark.parametrize("partial", [False, True])
    def test_dcps_planner_with_our_reader(self, disk: Folder, partial: bool) -> None:
        save(disk, "first", example())
        error = cause(
            lambda: dcp.load(
                {"weight": torch.zeros(3, 4)},
                storage_reader=StorageReader((disk / "first").url),
                planner=dcp.DefaultLoadPlanner(allow_partial_load=partial),
                no_dist=True,
            )
        )
        assert isinstance(error, InvalidPlan)
        assert "planner=LoadPlanner()" in str(error)

    def test_our_planner_with_dcps_reader(self, disk: Folder) -> None:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=(disk / "first").url, no_dist=True)
        error = cause(
            lambda: dcp.load(
                {"w": torch.zeros(2)},
                checkpoint_id=(disk / "first").url,
                planner=LoadPlanner(),
                no_dist=True,
            )
        )
        assert isinstance(error, IncompatibleCheckpoint)
        assert "storage_reader=StorageReader(path)" in str(error)

    def test_a_checkpoint_of_dcps_own(self, disk: Folder) -> None:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=(disk / "first").url, no_dist=True)
        error = cause(lambda: load(disk, "first", {"w": torch.zeros(2)}))
        assert isinstance(error, CheckpointNotFound)
        assert "'first'" in str(error)


class TestStatesThatDontFit:
    @pytest.mark.parametrize(
        ("live", "message"),
        [
            ({"other": 1}, "has no state 'other'"),
            ({"weight": torch.zeros(4, 3)}, r"the model wants float32 \[4, 3\]"),
            ({"weight": torch.zeros(3, 4).half()}, "the model wants float16"),
            ({"counter": {"value": 1, "more": 2}}, r"counter\.more is not in the checkpoint"),
        ],
    )
    def test_nothing_is_changed(self, disk: Folder, live: State, message: str) -> None:
        save(disk, "first", example(5.0))
        state: State = {"rng": np.zeros(3), "optimizer": example(0.0)["optimizer"], **live}
        error = cause(lambda: load(disk, "first", state))
        assert isinstance(error, IncompatibleCheckpoint)
        with pytest.raises(IncompatibleCheckpoint, match=message):
            raise error
        assert state["rng"].tolist() == [0, 0, 0]
        assert float(state["optimizer"][0]["step"]) == 0

    def test_what_needs_pickle(self, disk: Folder) -> None:
        error = cause(lambda: save(disk, "first", {"reader": {"open": print}}))
        assert isinstance(error, UnsupportedState)
        assert "reader.open is a " in str(error)
        assert disk.names() == []


class TestDamage:
    def chunks(self, root: Folder, name: str) -> list[Any]:
        return [
            decode_state_chunk(chunk.entry, read_chunk(root, chunk))
            for chunk in read_indexes(root, read_manifest(root, name))
        ]

    def test_every_flipped_byte_is_detected(self, disk: Folder) -> None:
        manifest = save(disk, "first", {"w": torch.arange(7.0), "n": {"a": 1}})
        (file,) = manifest.files
        path = Path(disk.url) / "first" / file.name
        whole = path.read_bytes()
        assert len(self.chunks(disk, "first")) == 2
        for place in range(file.index_offset + file.index_length):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpoint, match=file.name):
                self.chunks(disk, "first")

    @pytest.mark.parametrize("what", ["flip", "cut", "longer", "missing"])
    def test_loading_damaged_files(self, disk: Folder, what: str) -> None:
        save(disk, "first", example(5.0))
        path = Path(disk.url) / "first" / "rank-00000.bin"
        whole = path.read_bytes()
        if what == "missing":
            path.unlink()
        else:
            changed = {"flip": bytes([whole[0] ^ 1]) + whole[1:], "cut": whole[:-1]}
            path.write_bytes(changed.get(what, whole + b"\0"))
        error = cause(lambda: load(disk, "first", example(0.0)))
        assert isinstance(error, CorruptCheckpoint)
        assert "rank-00000.bin" in str(error)

    def test_a_missing_manifest(self, disk: Folder) -> None:
        save(disk, "first", example())
        (Path(disk.url) / "first" / MANIFEST_NAME).unlink()
        assert isinstance(cause(lambda: load(disk, "first", example())), CheckpointNotFound)


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


# Rows of tables: local shards made by hand, saved as a Checkpointer does.


def make_shard(table: str, shape: TableShape, rectangle: Rectangle) -> LocalShard:
    generator = torch.Generator().manual_seed(len(table))
    return LocalShard(
        table,
        shape,
        rectangle,
        torch.randn((rectangle.rows, rectangle.cols), generator=generator),
        {
            "momentum1": torch.rand(rectangle.rows, generator=generator),
            "exp_avg_sq": torch.rand((rectangle.rows, rectangle.cols), generator=generator),
        },
    )


BIG, SMALL = TableShape(100, 8), TableShape(7, 4)
TABLES = {"ebc.big": BIG, "ebc.small": SMALL}


def make_shards() -> list[LocalShard]:
    return [
        make_shard("ebc.big", BIG, Rectangle(0, 60, 0, 8)),
        make_shard("ebc.big", BIG, Rectangle(60, 100, 0, 4)),
        make_shard("ebc.big", BIG, Rectangle(60, 100, 4, 8)),
        make_shard("ebc.small", SMALL, Rectangle(0, 7, 0, 4)),
    ]


def save_rows(
    root: Folder,
    name: str,
    shards: list[LocalShard],
    modified: list[list[int]] | None = None,
    header: Header | None = None,
    bits: int | None = None,
    chunk_bytes: int = 500,
) -> Manifest:
    snapshots = []
    for i, shard in enumerate(shards):
        mask = None
        if modified is not None:
            mask = torch.zeros(shard.rectangle.rows, dtype=torch.bool)
            mask[modified[i]] = True
        snapshots.append(ShardSnapshot(shard, None if mask is None else RowSet(mask)))
    snapshot = Snapshot(snapshots, TABLES, {"reader": {"samples": 5}, "w": torch.ones(10)})
    quantization = Quantization(bits, "asymmetric", exact_below_rows=0)
    items = Items.of(snapshot, quantization, chunk_bytes)
    summary = summarize(header or Header(bits=bits), snapshot, items, quantization)
    planner = CheckpointPlanner(lambda path: Prepared(summary, items.by_name))
    return save(root, name, {}, planner)


@pytest.mark.parametrize("bits", [None, 8, 4, 2])
def test_a_manifest_accounts_for_every_byte(root: Folder, bits: int | None) -> None:
    shards = make_shards()
    manifest = save_rows(root, "first", shards, bits=bits)
    folder = root / "first"
    listing = {name: folder.size(name) for name in folder.names()}
    assert listing.pop(MANIFEST_NAME) == len(manifest.to_bytes())
    assert listing == {file.name: file.size for file in manifest.files}
    report = checkpoint_report(manifest, 1, Progress())
    assert sum(report.bytes.values()) == report.total_bytes
    assert report.total_bytes == sum(folder.size(name) or 0 for name in folder.names())
    assert all(size > 0 for name, size in report.bytes.items() if name != "ids")
    assert report.bytes["ids"] == 0
    assert report.bytes["optimizer"] == sum(s.nbytes for x in shards for s in x.optimizer.values())
    weights = sum(shard.weight.nbytes for shard in shards)
    assert (report.bytes["weights"] == weights) == (bits is None)
    assert report.bytes["weights"] <= weights
    assert (report.error_mean is None) == (report.error_max is None) == (bits is None)
    assert manifest.lossy == (bits is not None)
    assert report.full_fp32_bytes == weights + report.bytes["optimizer"] + report.bytes["dense"]
    assert report.modified_rows == report.total_rows == 107
    assert report.modified_fraction == 1.0
    assert {t.value_bits for t in manifest.tables.values()} == {bits or 32}


def read_tables(root: Folder, name: str) -> dict[str, torch.Tensor]:
    """The tables that a chain holds, newest rows last, by a reader of our own."""
    tables = {table: torch.full((s.rows, s.dim), torch.nan) for table, s in TABLES.items()}
    for part in read_content(root, resolve(root, name)).chunks:
        for chunk in part:
            if chunk.entry["kind"] == "rows":
                rows = decode_rows(chunk.entry, read_chunk(root, chunk))
                start, stop = chunk.entry["columns"]
                tables[chunk.entry["table"]][rows.ids, start:stop] = rows.weight
    return tables


def test_full_and_differential_rows(root: Folder) -> None:
    shards = make_shards()
    full = save_rows(root, "first", shards)
    assert sum(file.chunks for file in full.files) > len(shards) + 2
    wanted = {table: torch.full((s.rows, s.dim), torch.nan) for table, s in TABLES.items()}

    def put_wanted() -> None:
        for s in shards:
            r = s.rectangle
            wanted[s.table][r.row_start : r.row_stop, r.col_start : r.col_stop] = s.weight

    put_wanted()
    for table, values in read_tables(root, "first").items():
        assert torch.equal(values, wanted[table])
    modified = [[0, 1, 2, 59], [], list(range(40)), [6]]
    for shard, rows in zip(shards, modified, strict=True):
        shard.weight[rows] += 1
    put_wanted()
    header = Header(kind="differential", parent=full.link, previous=full.link, step=10)
    second = save_rows(root, "second", shards, modified, header, chunk_bytes=1 << 20)
    for table, values in read_tables(root, "second").items():
        assert torch.equal(values, wanted[table])
    assert (second.kind, second.parent, second.step) == ("differential", full.link, 10)
    report = checkpoint_report(second, 2, Progress())
    stored = 4 * 8 + 40 * 4 + 4
    assert second.modified_fraction == stored / (800 + 28)
    assert report.bytes["weights"] == 4 * stored
    assert report.bytes["ids"] == 3  # the gaps of the one shard whose rows don't follow each other
    assert report.full_fp32_bytes == checkpoint_report(full, 1, Progress()).full_fp32_bytes


def test_a_differential_checkpoint_without_a_row(root: Folder) -> None:
    shards = make_shards()
    full = save_rows(root, "first", shards, bits=8)
    header = Header(kind="differential", parent=full.link, bits=8)
    second = save_rows(root, "second", shards, [[], [], [], []], header, bits=8)
    assert second.modified_fraction == 0
    assert not second.lossy
    assert set(second.tables) == set(TABLES)
    assert read_tables(root, "second").keys() == TABLES.keys()


def test_a_broken_chain_names_the_missing_parent(disk: Folder) -> None:
    full = save_rows(disk, "first", make_shards())
    header = Header(kind="differential", parent=Link(full.id, "0" * 32))
    save_rows(disk, "second", make_shards(), [[], [], [], []], header)
    error = cause(lambda: load(disk, "second", {"w": torch.zeros(10)}))
    assert isinstance(error, ChainBroken)
    assert "second needs first" in str(error)


def test_loading_without_the_tables_is_refused(disk: Folder) -> None:
    save_rows(disk, "first", make_shards())
    error = cause(lambda: load(disk, "first", {"w": torch.zeros(10)}))
    assert isinstance(error, IncompatibleCheckpoint)
    assert "'ebc.big' (100 × 8)" in str(error)
    assert "'ebc.small' (7 × 4)" in str(error)


class TestGlobalPlan:
    """What rank 0 checks of all ranks' plans."""

    def summary(self, *shards: tuple[str, Rectangle], **other: Any) -> PlanSummary:
        plain: State = {
            "header": Header(step=5),
            "tables": {"t": TableShape(10, 8)},
            "shards": list(shards),
            "fp32_bytes": dict.fromkeys((table for table, _ in shards), 32),
            "progress": {},
            "replicated": {},
            "per_rank": (),
        }
        return PlanSummary(**{**plain, **other})

    def plan(self, *summaries: PlanSummary) -> tuple[list[SavePlan], GlobalPlan]:
        plans = []
        for rank, summary in enumerate(summaries):
            keys = [f"{table}{rectangle}#0" for table, rectangle in summary.shards]
            keys += [f"state:{name}" for name in summary.replicated]
            keys += [f"state:{name}@{rank}" for name in summary.per_rank]
            items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in keys]
            plans.append(SavePlan(items, planner_data=summary))
        planned, metadata = SavePlanner().create_global_plan(plans)
        assert isinstance(metadata.planner_data, GlobalPlan)
        return planned, metadata.planner_data

    @pytest.mark.parametrize(
        "rectangles",
        [
            [Rectangle(0, 10, 0, 8)],
            [Rectangle(0, 5, 0, 8), Rectangle(5, 10, 0, 8)],
            [Rectangle(0, 10, 4, 8), Rectangle(0, 10, 0, 4)],
            [Rectangle(0, 5, 0, 4), Rectangle(0, 5, 4, 8), Rectangle(5, 10, 0, 8)],
            [Rectangle(0, 10, 0, 8), Rectangle(10, 10, 0, 8)],  # a rank without rows
        ],
    )
    def test_parts_that_make_a_table(self, rectangles: list[Rectangle]) -> None:
        plans, whole = self.plan(*(self.summary(("t", r)) for r in rectangles))
        assert [len(plan.items) for plan in plans] == [1] * len(rectangles)
        assert whole.chunks == (1,) * len(rectangles)
        assert whole.fp32_bytes == {"t": 32 * len(rectangles)}
        assert whole.header == Header(step=5)
        assert all(plan.planner_data is None for plan in plans)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (Rectangle(0, 10, 0, 8), Rectangle(0, 10, 0, 8)),
            (Rectangle(0, 6, 0, 8), Rectangle(5, 10, 0, 8)),
            (Rectangle(0, 10, 0, 5), Rectangle(0, 10, 4, 8)),
            (Rectangle(0, 10, 0, 8), Rectangle(9, 10, 7, 8)),
        ],
    )
    def test_two_ranks_with_the_same_rows(self, one: Rectangle, other: Rectangle) -> None:
        nothing = self.summary()
        with pytest.raises(InvalidPlan, match=r"^t: ranks 1 and 2 would both write \["):
            self.plan(nothing, self.summary(("t", one)), self.summary(("t", other)))

    @pytest.mark.parametrize(
        ("rectangles", "covered"),
        [
            ([], 0),
            ([Rectangle(0, 9, 0, 8)], 72),
            ([Rectangle(0, 10, 0, 4)], 40),
            ([Rectangle(0, 5, 0, 8), Rectangle(5, 10, 0, 4)], 60),
        ],
    )
    def test_a_missing_part(self, rectangles: list[Rectangle], covered: int) -> None:
        summaries = [self.summary(), *(self.summary(("t", r)) for r in rectangles)]
        with pytest.raises(InvalidPlan, match=rf"^t: the ranks hold {covered} of 10 × 8 values"):
            self.plan(*summaries)

    def test_a_sharded_buffer_in_parts(self) -> None:
        def part(start: int, stop: int) -> PlanSummary:
            rectangle = Rectangle(start, stop, 0, 1)
            block = BlockSummary(("model", "ids"), "int64", (9,), rectangle)
            return self.summary(tables={}, blocks=[block])

        self.plan(part(5, 9), self.summary(tables={}), part(0, 5))
        with pytest.raises(InvalidPlan, match=r"^model\.ids: ranks 2 and 0 would both write "):
            self.plan(part(4, 9), self.summary(tables={}), part(0, 5))
        with pytest.raises(InvalidPlan, match=r"^model\.ids: the ranks hold 8 of 9 × 1 values"):
            self.plan(part(5, 9), part(0, 4))

    def test_an_unknown_table(self) -> None:
        whole = self.summary(("t", Rectangle(0, 10, 0, 8)))
        with pytest.raises(InvalidPlan, match="rank 1 writes rows of 'u'"):
            self.plan(whole, self.summary(("u", Rectangle(0, 1, 0, 8))))

    @pytest.mark.parametrize(
        "other",
        [
            {"header": Header(step=6)},
            {"header": Header(step=5, kind="differential", parent=Link("x", "0"))},
            {"tables": {"t": TableShape(10, 9)}},
            {"tables": {}},
            {"per_rank": ("reader",)},
        ],
    )
    def test_ranks_that_disagree(self, other: State) -> None:
        whole = self.summary(("t", Rectangle(0, 10, 0, 8)))
        what = next(iter(other))
        with pytest.raises(
            InvalidPlan, match=rf"^ranks 0 and 2 don't save the same checkpoint: {what} is "
        ):
            self.plan(whole, self.summary(), self.summary(**other))

    def test_what_all_have_alike_is_written_once_and_shared_out(self) -> None:
        sizes = {"model": 100, "a": 60, "b": 50, "c": 10, "empty": 0}
        summaries = [self.summary(tables={}, replicated=sizes) for _ in range(3)]
        plans, whole = self.plan(*summaries)
        written = [[item.index.fqn for item in plan.items] for plan in plans]
        assert sorted(chain(*written)) == sorted(f"state:{name}" for name in sizes)
        load = [sum(sizes[key.removeprefix("state:")] for key in keys) for keys in written]
        assert max(load) == 100
        assert whole.states == dict.fromkeys(sizes, False)
        assert whole.chunks == tuple(len(keys) for keys in written)

    def test_per_rank_states_are_written_by_all(self) -> None:
        plans, whole = self.plan(*(self.summary(tables={}, per_rank=("rng",)) for _ in range(3)))
        keys = [[item.index.fqn for item in plan.items] for plan in plans]
        assert keys == [["state:rng@0"], ["state:rng@1"], ["state:rng@2"]]
        assert whole.states == {"rng": True}

    def test_a_state_that_only_some_ranks_have(self) -> None:
        """Its writer must be one of them."""
        plans, _ = self.plan(
            self.summary(tables={}), self.summary(tables={}, replicated={"late": 5})
        )
        assert [len(plan.items) for plan in plans] == [0, 1]


def test_finish_counts_what_was_written(disk: Folder) -> None:
    """A rank that silently wrote less than planned must not be committed."""

    class Forgetful(StorageWriter):
        def write_data(self, plan: SavePlan, planner: Any) -> Any:
            return super().write_data(replace(plan, items=plan.items[1:]), planner)

    error = cause(
        lambda: dcp.save(
            example(),
            storage_writer=Forgetful((disk / "first").url),
            planner=SavePlanner(),
            no_dist=True,
        )
    )
    assert isinstance(error, CheckNRunError)
    assert "were to write (5,) chunks, but wrote (4,)" in str(error)
    assert MANIFEST_NAME not in (disk / "first").names()
