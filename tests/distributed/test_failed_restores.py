"""What goes wrong is said with this package's errors, on all ranks, and leaves the model whole."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed import references
from tests.distributed.models import (
    CollectionSpec,
    Job,
    ModelSpec,
    Plan,
    TableSpec,
    gather,
    local_bytes,
    row_bytes,
    scramble,
    uniform_plan,
)
from tests.distributed.reader30 import read_rows
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import (
    Checkpointer,
    Consecutive,
    Full,
    LoadPlanner,
    PerRank,
    StorageReader,
    errors,
    filesystem,
    rank_file,
    storage,
)
from torchrec_checknrun.read_chunks import StoredChunk

Workers = Callable[[int], WorkerPool]


class Made(Protocol):
    def __call__(self, tmp_path: Path, full: bool = False) -> list[str]: ...


TABLES = (TableSpec("t0", 40, 8, ("f0", "f1")), TableSpec("t1", 30, 4, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES), CollectionSpec("b", TABLES[:1])))


def plan_of(spec: ModelSpec, ranks: int = 2) -> Plan:
    return uniform_plan(spec, "row_wise", ranks)


def where(tmp_path: Path, spec: ModelSpec = SPEC, ranks: int = 2) -> dict[str, Any]:
    return {"root": str(tmp_path / "root"), "spec": spec.to_json(), "plan": plan_of(spec, ranks)}


def build(spec: dict[str, Any], plan: Plan, seed: int = 0) -> Job:
    return Job.build(ModelSpec.from_json(spec), plan, seed=seed)


def checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job, **options.pop("state", {})}
    return Checkpointer(
        root, model=job.model, state=state, chunk_bytes=600, retention=None, **options
    )


def save(saver: Checkpointer) -> str:
    report = saver.save()
    assert report is not None
    return report.id


def keep(job: Job, root: str, name: str) -> None:
    state = gather(job)
    if dist.get_rank() == 0:
        references.store(Path(root).parent / f"{name}.npz", state)


def is_at(job: Job, root: str, name: str) -> bool:
    wanted = references.load(Path(root).parent / f"{name}.npz")
    return references.differences(gather(job), wanted, None) == []


def three_checkpoints(root: str, spec: dict[str, Any], plan: Plan, full: bool = False) -> list[str]:
    """A full checkpoint and two on top of it (or three full ones), each with a copy beside."""
    job = build(spec, plan)
    names = []
    with checkpointer(root, job, policy=Full() if full else Consecutive()) as saver:
        for _ in range(3):
            for _ in range(2):
                job.train()
                saver.step()
            names.append(save(saver))
            keep(job, root, names[-1])
    return names


@pytest.fixture(scope="module")
def made(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Puts three checkpoints, and copies of their states, into a folder; trained once for all."""
    folders: dict[bool, tuple[Path, list[str]]] = {}

    def make(tmp_path: Path, full: bool = False) -> list[str]:
        if full not in folders:
            folder = tmp_path_factory.mktemp("made")
            names = workers(2).run(three_checkpoints, **where(folder), full=full)[0]
            folders[full] = (folder, names)
        shutil.copytree(folders[full][0], tmp_path, dirs_exist_ok=True)
        return list(folders[full][1])

    return make


def restore_is_refused(
    root: str,
    spec: dict[str, Any],
    plan: Plan,
    error: str,
    match: str,
    name: str | None = None,
    verify: Any = "read",
) -> None:
    """It raises, nothing is changed, and training and saving go on (in another root)."""
    job = build(spec, plan, seed=5)
    job.train(1)
    with checkpointer(root, job) as saver:
        before = local_bytes(job)
        with pytest.raises(getattr(errors, error), match=match):
            saver.restore(name, verify=verify)
        assert local_bytes(job) == before
        assert job.steps == 1
        job.train(1)
        saver.step()


# A checkpoint that doesn't fit.


def resized(rows: int = 40, dim: int = 8) -> ModelSpec:
    tables = (replace(TABLES[0], rows=rows, dim=dim), TABLES[1])
    return ModelSpec((CollectionSpec("a", tables), SPEC.collections[1]))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (resized(rows=39), r"a\.embedding_bags\.t0.*40 × 8.*39 × 8"),
        (resized(dim=12), r"a\.embedding_bags\.t0.*40 × 8.*40 × 12"),
        (ModelSpec(SPEC.collections[:1]), r"b\.embedding_bags\.t0.*only in the checkpoint"),
        (ModelSpec((*SPEC.collections, CollectionSpec("c", TABLES))), r"c\..*only in the model"),
        (replace(SPEC, fused="sgd"), r"embedding_bags.*momentum1.*has none"),
        (replace(SPEC, hidden=5), r"model\.hidden\..*\[4.*\[5"),
    ],
    ids=["rows", "dim", "table_gone", "table_new", "fused_optimizer", "dense_shape"],
)
@pytest.mark.parametrize("by_id", [False, True])
def test_another_model(
    workers: Workers, made: Made, tmp_path: Path, spec: ModelSpec, match: str, by_id: bool
) -> None:
    names = made(tmp_path)
    workers(2).run(
        restore_is_refused,
        **where(tmp_path, spec),
        error="IncompatibleCheckpoint",
        match=match,
        name=names[-1] if by_id else None,
    )


DENSE_OPTIMIZERS = ["adagrad", "adam", "sgd"]


@pytest.mark.parametrize("saved", DENSE_OPTIMIZERS)
@pytest.mark.parametrize("wanted", DENSE_OPTIMIZERS)
def test_dense_optimizers(workers: Workers, tmp_path: Path, saved: str, wanted: str) -> None:
    """Also Adam in a new process, which creates its state only at its first step."""
    workers(2).run(three_checkpoints, **where(tmp_path, replace(SPEC, dense=saved)))
    other = where(tmp_path, replace(SPEC, dense=wanted))
    if saved == wanted:
        workers(2).run(restores_in_a_new_process, **other)
    else:
        workers(2).run(dense_optimizer_is_refused, **other)


def restores_in_a_new_process(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        assert is_at(job, root, report.id)


def dense_optimizer_is_refused(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job, same = build(spec, plan, seed=5), build(spec, plan, seed=5)
    refused = pytest.raises(errors.IncompatibleCheckpoint, match=r"optimizer\.state\.dense\.")
    with checkpointer(root, job) as saver, refused:
        saver.restore()
    for either in (job, same):
        either.train(2)
    assert local_bytes(job) == local_bytes(same)


def key_is_missing(root: str, spec: dict[str, Any], plan: Plan, only_rank: int) -> None:
    """A state that the checkpoint hasn't got, on all ranks (-1) or one of them."""
    job = build(spec, plan, seed=5)
    extra = {"extra": Note("x")} if only_rank in (-1, dist.get_rank()) else {}
    with checkpointer(root, job, state=extra) as saver:
        before = local_bytes(job)
        with pytest.raises(errors.IncompatibleCheckpoint, match="no state 'extra'"):
            saver.restore()
        assert local_bytes(job) == before


class Note:
    """A state object with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("only_rank", [-1, 0, 1])
def test_missing_state(workers: Workers, made: Made, tmp_path: Path, only_rank: int) -> None:
    made(tmp_path)
    workers(2).run(key_is_missing, **where(tmp_path), only_rank=only_rank)


# A checkpoint that is damaged.


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def index_of(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Where a rank file's index is, and what it says."""
    data = path.read_bytes()
    offset, length, _, _ = struct.unpack("<QQ16s8s", data[-40:])
    return offset, json.loads(data[offset : offset + length])["chunks"]


def damage(checkpoint: Path, how: str) -> None:
    rank_file = checkpoint / "rank-00001.bin"
    if how == "manifest":
        text = (checkpoint / "manifest.json").read_bytes()
        flip(checkpoint / "manifest.json", text.index(b'"step"') + 8)
    elif how == "manifest_cut":
        text = (checkpoint / "manifest.json").read_bytes()
        (checkpoint / "manifest.json").write_bytes(text[: len(text) // 2])
    elif how == "manifest_empty":
        (checkpoint / "manifest.json").write_bytes(b"")
    elif how == "index":
        flip(rank_file, index_of(rank_file)[0] + 20)
    elif how == "truncated":
        rank_file.write_bytes(rank_file.read_bytes()[:-1])
    elif how == "missing":
        rank_file.unlink()
    elif how == "longer":
        rank_file.write_bytes(rank_file.read_bytes() + b"\0")
    elif how == "gone":
        shutil.rmtree(checkpoint)
    elif how == "uncommitted":
        (checkpoint / "manifest.json").unlink()
    elif how == "format":
        document = json.loads((checkpoint / "manifest.json").read_bytes())
        document["manifest"]["format_version"] = 999
        (checkpoint / "manifest.json").write_text(json.dumps(document))
    elif how in ("first_rows", "last_rows", "state"):
        file, chunk = chunks_of(checkpoint, "state" if how == "state" else "rows")[
            0 if how == "first_rows" else -1
        ]
        flip(file, chunk["offset"] + chunk["length"] // 2)
    elif how == "every_rows":
        for file, chunk in chunks_of(checkpoint, "rows"):
            flip(file, chunk["offset"] + chunk["length"] // 2)
    else:
        raise ValueError(how)


def chunks_of(checkpoint: Path, kind: str) -> list[tuple[Path, dict[str, Any]]]:
    files = sorted(checkpoint.glob("rank-*.bin"))
    found = [(file, chunk) for file in files for chunk in index_of(file)[1]]
    return [(file, chunk) for file, chunk in found if chunk["kind"] == kind and chunk["length"] > 0]


FOUND_BEFORE = [
    *("manifest", "manifest_cut", "manifest_empty", "format"),
    *("index", "truncated", "longer", "missing"),
]
FOUND_WHEN_READ = ["first_rows", "last_rows", "state"]


@pytest.mark.parametrize("how", FOUND_BEFORE)
def test_damaged_checkpoint_named(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[1], how)
    damaged = "UnsupportedFormat" if how == "format" else "CorruptCheckpoint"
    for name, error in ((names[1], damaged), (names[2], "ChainBroken")):
        if how == "index" and name == names[2]:
            error = "CorruptCheckpoint"
        workers(2).run(
            restore_is_refused, **where(tmp_path), error=error, match=names[1], name=name
        )


@pytest.mark.parametrize("how", ["gone", "uncommitted"])
def test_parent_is_missing(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], how)
    for name in (names[1], None):
        workers(2).run(
            restore_is_refused, **where(tmp_path), error="ChainBroken", match=names[0], name=name
        )
    workers(2).run(
        restore_is_refused,
        **where(tmp_path),
        error="CheckpointNotFound",
        match=names[0],
        name=names[0],
    )


def test_parent_was_replaced(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    other = tmp_path / "other"
    others = workers(2).run(three_checkpoints, **{**where(tmp_path), "root": str(other)})[0]
    shutil.rmtree(tmp_path / "root" / names[0])
    shutil.copytree(other / others[0], tmp_path / "root" / names[0])
    for name in (names[1], None):
        workers(2).run(
            restore_is_refused, **where(tmp_path), error="ChainBroken", match=names[0], name=name
        )


def starts_fresh(root: str, spec: dict[str, Any], plan: Plan) -> int:
    job = build(spec, plan)
    with checkpointer(root, job) as saver:
        before = local_bytes(job)
        assert saver.restore() is None
        assert local_bytes(job) == before
        job.train()
        report = saver.save()
        assert report is not None
        assert report.kind == "full"
        return report.sequence


def test_nothing_committed_is_a_fresh_start(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(starts_fresh, **where(tmp_path))[0] == 1
    for manifest in (tmp_path / "root").glob("*/manifest.json"):
        damage(manifest.parent, "uncommitted")
    assert workers(2).run(starts_fresh, **where(tmp_path))[0] == 2
    workers(2).run(
        restore_is_refused,
        **where(tmp_path),
        error="CheckpointNotFound",
        match="seq-000009",
        name="seq-000009_step-00000001_00000000",
    )


def falls_back(
    root: str, spec: dict[str, Any], plan: Plan, to: str, passed_over: list[str]
) -> list[str]:
    """Restores the newest whole chain, trains, and saves upon it."""
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        report = saver.restore()
        assert report is not None
        assert report.id == to
        assert len(report.passed_over) == len(passed_over)
        for name, problem in zip(passed_over, report.passed_over, strict=True):
            assert problem.startswith(name)
        assert is_at(job, root, to)
        assert saver.steps == job.steps == report.step
        job.train()
        new = save(saver)
        keep(job, root, new)
        scramble(job)
        found = saver.restore(new)
        assert found is not None
        assert is_at(job, root, new)
        return list(found.chain)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, how) for how in (*FOUND_BEFORE, *FOUND_WHEN_READ)] + [(1, how) for how in FOUND_WHEN_READ],
)
def test_falls_back_to_the_newest_whole_chain(
    workers: Workers, made: Made, tmp_path: Path, how: str, ranks: int
) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[2], how)
    chain = workers(ranks).run(
        falls_back, **where(tmp_path, ranks=ranks), to=names[1], passed_over=[names[2]]
    )[0]
    # OneShot goes on from the baseline of what was restored; the damaged one is of no lineage.
    assert chain[0] == names[0]
    assert names[2] not in chain


@pytest.mark.parametrize("how", ["manifest", "index", *FOUND_WHEN_READ])
def test_falls_back_over_several(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    names = made(tmp_path, True)
    for name in names[1:]:
        damage(tmp_path / "root" / name, how)
    workers(2).run(falls_back, **where(tmp_path), to=names[0], passed_over=[names[2], names[1]])


def only_one_is_damaged(root: str, spec: dict[str, Any], plan: Plan, name: str | None) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.ModelPartlyRestored):
            saver.restore(name)
        for act in (saver.step, saver.save):
            with pytest.raises(errors.ModelPartlyRestored):
                act()


def mend(root: str, spec: dict[str, Any], plan: Plan, name: str, sound: str) -> None:
    """After one that failed half-way, a sound checkpoint makes the model whole again."""
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.ModelPartlyRestored):
            saver.restore(name)
        saver.restore(sound)
        assert is_at(job, root, sound)
        job.train()
        save(saver)


@pytest.mark.parametrize("how", FOUND_WHEN_READ)
def test_damage_met_midway(workers: Workers, made: Made, tmp_path: Path, how: str) -> None:
    first, _, third = made(tmp_path, True)
    damage(tmp_path / "root" / third, how)
    workers(2).run(mend, **where(tmp_path), name=third, sound=first)
    shutil.rmtree(tmp_path / "root")
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], how)
    workers(2).run(only_one_is_damaged, **where(tmp_path), name=names[0])


def test_damage_met_midway_in_a_parent(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[0], "every_rows")
    for name in (names[1], None):
        workers(2).run(only_one_is_damaged, **where(tmp_path), name=name)


def superseded_is_damaged(root: str, spec: dict[str, Any], plan: Plan, names: list[str]) -> None:
    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver:
        with pytest.raises(errors.CorruptCheckpoint, match=names[0]):
            saver.restore(names[2], verify="all")
        saver.restore(names[2])
        assert is_at(job, root, names[2])


def test_damage_in_rows_that_newer_ones_replace(
    workers: Workers, made: Made, tmp_path: Path
) -> None:
    """They are not read, unless everything is to be verified."""
    names = made(tmp_path)
    newer = [c for name in names[1:] for _, c in chunks_of(tmp_path / "root" / name, "rows")]
    replaced = 0
    for file, chunk in chunks_of(tmp_path / "root" / names[0], "rows"):
        if any(covers(other, chunk) for other in newer):
            flip(file, chunk["offset"] + chunk["length"] // 2)
            replaced += 1
    assert replaced
    workers(2).run(superseded_is_damaged, **where(tmp_path), names=names)


def covers(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Whether it has all the rows of another chunk's range."""
    (first, last), (start, stop) = [[chunk["first"], chunk["last"]] for chunk in (newer, older)]
    same = newer["table"] == older["table"] and newer["columns"] == older["columns"]
    return same and newer["count"] == last - first + 1 and first <= start and stop <= last


@pytest.mark.parametrize("how", FOUND_WHEN_READ)
def test_verify_all_finds_damage_before(
    workers: Workers, made: Made, tmp_path: Path, how: str
) -> None:
    names = made(tmp_path)
    for name in names:
        damage(tmp_path / "root" / name, how)
    refusals: list[tuple[str | None, str]] = [
        (names[0], "CorruptCheckpoint"),
        (None, "ChainBroken"),
    ]
    for damaged, error in refusals:
        workers(2).run(
            restore_is_refused,
            **where(tmp_path),
            error=error,
            match=names[0],
            name=damaged,
            verify="all",
        )


def load_is_refused(root: str, spec: dict[str, Any], plan: Plan, name: str, match: str) -> None:
    job = build(spec, plan, seed=5)
    before = local_bytes(job)
    state = {"model": job.model, "optimizer": job.optimizer}
    reader = StorageReader(Path(root) / name)
    with pytest.raises(CheckpointException, match=match):
        dcp.load(state, planner=LoadPlanner(), storage_reader=reader)
    assert local_bytes(job) == before


@pytest.mark.parametrize("how", [*FOUND_BEFORE, "gone", "uncommitted"])
def test_damaged_checkpoint_through_dcp_load(
    workers: Workers, made: Made, tmp_path: Path, how: str
) -> None:
    names = made(tmp_path)
    damage(tmp_path / "root" / names[2], how)
    error = {
        "format": "UnsupportedFormat",
        "gone": "CheckpointNotFound",
        "uncommitted": "CheckpointNotFound",
    }.get(how, "CorruptCheckpoint")
    workers(2).run(load_is_refused, **where(tmp_path), name=names[2], match=error)


def read_fails_on_one_rank(root: str, spec: dict[str, Any], plan: Plan, names: list[str]) -> None:
    """The storage answers rank 1 with errors for the newest checkpoint's chunks."""
    read_chunk = storage.read_chunk

    def failing(folder: filesystem.Folder, chunk: StoredChunk, *memory: Any) -> memoryview:
        if dist.get_rank() == 1 and chunk.checkpoint == names[2]:
            raise OSError("connection reset")
        return read_chunk(folder, chunk, *memory)

    job = build(spec, plan, seed=5)
    with checkpointer(root, job) as saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "read_chunk", failing)
        report = saver.restore()
        assert report is not None
        assert report.id == names[1]
        assert is_at(job, root, names[1])
        with pytest.raises(errors.ModelPartlyRestored, match="connection reset"):
            saver.restore(names[2])


def test_reading_fails_on_one_rank(workers: Workers, made: Made, tmp_path: Path) -> None:
    names = made(tmp_path)
    workers(2).run(read_fails_on_one_rank, **where(tmp_path), names=names)


class Stubborn(Note):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not mine")


def state_refuses(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job, state={"note": Stubborn(1)}) as saver:
        save(saver)
        with pytest.raises(errors.ModelPartlyRestored, match="not mine"):
            saver.restore()
        with pytest.raises(errors.ModelPartlyRestored):
            saver.step()


def test_state_object_refuses_its_content(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(state_refuses, **where(tmp_path))


# A save that fails.


class Unstorable(Note):
    """Can't be stored on one rank, while it is switched on."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        self.how: str | None = how

    def state_dict(self) -> dict[str, Any]:
        if self.how is None or dist.get_rank() != 1:
            return super().state_dict()
        if self.how == "raises":
            raise RuntimeError("no state today")
        return {"value": {"deep": [1, {2, 3}]}}


def save_fails_once(root: str, spec: dict[str, Any], plan: Plan, how: str, error: str) -> None:
    """A save fails on one rank; on all it is an error, and the next holds its rows."""
    note = Unstorable(how)
    job = build(spec, plan)
    saver = checkpointer(root, job, state={"note": note}, policy=Consecutive())
    note.how = None
    job.train()
    baseline = save(saver)
    before = row_bytes(job.spec, gather(job))
    job.train()
    note.how = how if how in ("unstorable", "raises") else None
    with pytest.MonkeyPatch.context() as patch:
        if how == "write" and dist.get_rank() == 1:
            patch.setattr(rank_file, "_write_index", raise_os_error)
        if how == "manifest":
            patch.setattr(filesystem.Folder, "put", raise_os_error)
        if how == "steps":
            saver.steps += dist.get_rank()
        with pytest.raises(getattr(errors, error), match=MESSAGES[how]):
            saver.save()
        if how == "steps":
            saver.steps -= dist.get_rank()
    note.how = None
    dist.barrier()
    assert [path.parent.name for path in Path(root).glob("*/manifest.json")] == [baseline]
    job.train()
    after = row_bytes(job.spec, gather(job))
    name = save(saver)
    keep(job, root, name)
    assert read_rows(Path(root) / name).keys() == {k for k in after if after[k] != before[k]}
    scramble(job)
    report = saver.restore()
    assert report is not None
    assert report.chain == (baseline, name)
    assert is_at(job, root, name)
    saver.close()


def raise_os_error(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


MESSAGES = {
    "unstorable": r"note\.value\.deep\[1\] is a builtins\.set",
    "raises": "no state today",
    "write": "no space left",
    "manifest": "no space left",
    "steps": r"different steps \[0, 1\]",
}


@pytest.mark.parametrize("how", sorted(MESSAGES))
def test_save_that_fails_loses_no_row(workers: Workers, tmp_path: Path, how: str) -> None:
    error = "UnsupportedState" if how == "unstorable" else "SaveFailed"
    workers(2).run(save_fails_once, **where(tmp_path), how=how, error=error)


def root_is_a_file(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with checkpointer(root, job) as saver, pytest.raises(errors.SaveFailed):
        saver.save()


def test_root_is_a_file(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    workers(2).run(root_is_a_file, **where(tmp_path))


# State of which each rank has its own.


def save_per_rank(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    note = PerRank(Note(torch.arange(3) + 10 * dist.get_rank()))
    with checkpointer(root, job, state={"note": note}) as saver:
        save(saver)


def restore_per_rank(root: str, spec: dict[str, Any], plan: Plan, merge: bool) -> list[int]:
    job = build(spec, plan, seed=5)
    note = Note(torch.full((3,), -1))
    function = add_up if merge else None
    with checkpointer(root, job, state={"note": PerRank(note, function)}) as saver:
        saver.restore()
    found: list[int] = note.value.tolist()
    return found


def add_up(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {"value": torch.stack([state["value"] for state in states]).sum(dim=0)}


def refuse_per_rank(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan, seed=5)
    note = Note(torch.zeros(3))
    with checkpointer(root, job, state={"note": PerRank(note)}) as saver:
        before = local_bytes(job)
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"'note'.*PerRank\(.*merge"):
            saver.restore()
        assert local_bytes(job) == before
        assert note.value.tolist() == [0, 0, 0]


def test_per_rank_state(workers: Workers, tmp_path: Path) -> None:
    two, one = where(tmp_path), where(tmp_path, ranks=1)
    workers(2).run(save_per_rank, **two)
    own = [[0, 1, 2], [10, 11, 12]]
    assert workers(2).run(restore_per_rank, **two, merge=False) == own
    assert workers(2).run(restore_per_rank, **two, merge=True) == own
    assert workers(1).run(restore_per_rank, **one, merge=True) == [[10, 12, 14]]
    workers(1).run(refuse_per_rank, **one)
    shutil.rmtree(two["root"])
    workers(1).run(save_per_rank, **one)
    assert workers(2).run(restore_per_rank, **two, merge=True) == [[0, 1, 2]] * 2
    workers(2).run(refuse_per_rank, **two)


# A model that can't be tracked.


def untrackable(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    with pytest.raises(errors.UnsupportedTable, match=r"embedding_bags\.t0"):
        checkpointer(root, job)


def test_sharded_table_with_a_dense_optimizer(workers: Workers, tmp_path: Path) -> None:
    spec = replace(SPEC, fused="none", collections=SPEC.collections[1:])
    for sharding in ("row_wise", "table_wise:0"):  # on all ranks; on one
        plan = {"b.t0": sharding}
        workers(2).run(untrackable, root=str(tmp_path), spec=spec.to_json(), plan=plan)
