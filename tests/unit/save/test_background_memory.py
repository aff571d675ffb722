"""Test staging memory that grows, rows beyond the memory budget, and unreasonable budgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.crash.save_sweep import SPEC, alone
from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import gather, scramble
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Full, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.save import save_memory
from torchrec_checknrun.snapshot import memory as staging_memory
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.store.folder import Folder


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture
def job() -> Job:
    return Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1))


class Growing:
    """A state of any size."""

    def __init__(self) -> None:
        self.bytes = 1

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(self.bytes, dtype=torch.uint8)}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        assert bool((content["x"] == 1).all())


def checkpointer(root: Path, job: Job, growing: Growing, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job, "growing": growing}
    options.setdefault("memory_budget", 64 << 20)
    return Checkpointer(root, model=job.model, state=state, chunk_bytes=1000, **options)


def check_restored(saver: Checkpointer, job: Job) -> None:
    wanted = gather(job)
    scramble(job)
    assert saver.restore() is not None
    assert references.differences(gather(job), wanted, None) == []


# Growing


@pytest.mark.parametrize("kind", some_of(["thread", "process"], 0))
def test_the_old_memory_is_gone_before_there_is_new(
    tmp_path: Path, job: Job, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing, made, alive = Growing(), StagingMemory.__init__, weakref.WeakSet[StagingMemory]()
    together = []

    def make(memory: StagingMemory, *arguments: Any, **options: Any) -> None:
        gc.collect()
        together.append(sum(memory.size for memory in alive))
        made(memory, *arguments, **options)
        alive.add(memory)

    monkeypatch.setattr(StagingMemory, "__init__", make)
    with checkpointer(tmp_path, job, growing, background=kind, staging="copy") as saver:
        for size in (4 << 20, 9 << 20):
            growing.bytes = size
            job.train()
            saver.save()
        check_restored(saver, job)
    assert together == [0, 0, 0]


@pytest.mark.parametrize("shared", [False, True])
def test_discarded_memory_takes_none_whoever_refers_to_it(shared: bool) -> None:
    memory = StagingMemory(32 << 20, shared=shared)
    view = memory.bytes[5:]
    memory.bytes.fill_(7)
    before = resident()
    memory.discard()
    assert resident() < before - (30 << 20)
    assert not view.any()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", some_of(["thread", "process"], 0))
def test_it_is_made_again_after_it_could_not_be_made(
    tmp_path: Path, job: Job, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing()
    with checkpointer(tmp_path, job, growing, background=kind) as saver:
        job.train()
        saver.save()
        growing.bytes = 4 << 20
        for _ in range(2):
            job.train()
            with monkeypatch.context() as patch:
                patch.setattr(save_memory, "StagingMemory", mock.Mock(side_effect=MemoryError))
                with pytest.raises(SaveFailed, match="MemoryError"):
                    saver.save()
        job.train()
        report = saver.save()
        assert report is not None
        wanted = gather(job)
        scramble(job)
        assert saver.restore() is not None
        assert references.differences(gather(job), wanted, None) == []


def test_closes_after_it_could_not_be_made(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing()
    with checkpointer(tmp_path, job, growing) as saver:
        growing.bytes = 4 << 20
        job.train()
        monkeypatch.setattr(save_memory, "StagingMemory", mock.Mock(side_effect=MemoryError))
        with pytest.raises(SaveFailed, match="MemoryError"):
            saver.save()
        assert saver._saver._background.memory.staging.size == 0


def test_no_descriptor_stays_where_mapping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()  # of other tests, whose descriptors go at any time
    before = len(list(descriptors.iterdir()))
    monkeypatch.setattr(
        staging_memory.mmap, "mmap", mock.Mock(side_effect=OSError(12, "no memory"))
    )
    with pytest.raises(OSError, match="no memory"):
        StagingMemory(1 << 20, shared=True)
    assert len(list(descriptors.iterdir())) == before


# Budgets


@pytest.mark.parametrize("budget", [-5, 0, 1, 8, 64, 2047])
def test_a_budget_of_no_use_is_refused(tmp_path: Path, job: Job, budget: int) -> None:
    with pytest.raises(ValueError, match=rf"memory_budget={budget} .*bytes.*8 << 30 for 8 GiB"):
        checkpointer(tmp_path, job, Growing(), memory_budget=budget)


@pytest.mark.parametrize("budget", ["8GB", 8e9])
def test_a_budget_is_a_whole_number(tmp_path: Path, job: Job, budget: Any) -> None:
    with pytest.raises(TypeError, match=r"memory_budget must be an int, not .*8 << 30 for 8 GiB"):
        checkpointer(tmp_path, job, Growing(), memory_budget=budget)


@pytest.mark.parametrize(("budget", "warned"), [(2048, True), (8 << 20, False), (None, False)])
def test_a_small_budget_is_warned_of(
    tmp_path: Path,
    job: Job,
    budget: int | None,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with checkpointer(tmp_path, job, Growing(), memory_budget=budget):
        pass
    assert ("chunks will be small and saves slow" in caplog.text) == warned


def test_a_state_beyond_the_budget_is_saved_and_named_once(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    growing = Growing()
    with checkpointer(tmp_path, job, growing, memory_budget=1 << 20) as saver:
        job.train()
        saver.save()
        assert "in one piece" not in caplog.text
        for size in (3 << 20, 4 << 20):
            growing.bytes = size
            job.train()
            saver.save()
        check_restored(saver, job)
    (said,) = [r.getMessage() for r in caplog.records if "in one piece" in r.getMessage()]
    assert said.startswith("state:growing is staged")
    assert "memory_budget=1048576 " in said
    size = int(said.split(" bytes")[0].split()[-1])
    assert 3 << 20 <= size < (3 << 20) + 1000
    assert f"a budget of {2 * size} bytes" in said


# Amounts


def test_encoded_rows_take_less_than_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encode into the memory that was touched at the start."""
    table = TableSpec("t0", 20_000, 16, ("f0",))
    spec = ModelSpec((CollectionSpec("c", (table,)),))
    job = Job.build(spec, uniform_plan(spec, "table_wise", 1))
    monkeypatch.setattr(save_memory, "_SPARE_BYTES", 100_000)
    made = []
    for staging in ("copy", "encode"):
        with Checkpointer(
            tmp_path / staging,
            model=job.model,
            state={"optimizer": job.optimizer, "job": job},
            staging=staging,
            chunk_bytes=100_000,
            quantization=Quantization(bits=4, method="asymmetric", exact_below_rows=0),
        ) as saver:
            behind = saver._saver._background.memory
            with mock.patch.object(behind, "_make") as make:
                job.train()
                saver.save()
                make.assert_not_called()
            assert not behind.ring.waited
            made.append(behind.staging.size)
            wanted = gather(job)
            scramble(job)
            assert saver.restore() is not None
            assert references.differences(gather(job), wanted, 4) == []
    assert made[1] < made[0] / 2


def test_rows_that_can_t_be_encoded_fit_as_well(tmp_path: Path, job: Job) -> None:
    """Stage shards unencoded, in several rounds through the memory."""
    quantization = Quantization(bits=2, exact_below_rows=0)
    with checkpointer(
        tmp_path, job, Growing(), staging="encode", quantization=quantization, memory_budget=40_000
    ) as saver:
        for shard in saver._target.tracked.shards:
            shard.local.weight.fill_(float("inf"))
            shard.mark_all()
        saver.save()
        check_restored(saver, job)


def test_a_state_that_grows_does_not_touch_all_anew_each_time(tmp_path: Path, job: Job) -> None:
    growing = Growing()
    with checkpointer(tmp_path, job, growing, policy=Full()) as saver:
        memory = saver._saver._background.memory
        with mock.patch.object(memory, "_make", wraps=memory._make) as make:
            for size in range(10):
                growing.bytes = (2 << 20) + (size << 18)
                job.train()
                saver.save()
        assert make.call_count <= 3
        check_restored(saver, job)


# Chunks of large shards


@pytest.mark.parametrize("budget", [64 << 20, 40_000])
def test_a_large_shard_has_no_more_chunks_than_a_file_lists(
    tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6 MB a chunk, a rank of 700 GB could write all of its rows, and not their list."""
    spec = ModelSpec((CollectionSpec("c", (TableSpec("t", 5000, 8, ("f0",)),)),))
    job = Job.build(spec, uniform_plan(spec, "table_wise", 1))
    monkeypatch.setattr(save_memory, "_MOST_CHUNKS", 20)
    with checkpointer(tmp_path / "root", job, Growing(), memory_budget=budget) as saver:
        report = saver.save()
        check_restored(saver, job)
    manifest = read_manifest(Folder(tmp_path / "root"), report.id)
    (file,) = manifest.files
    if budget == 64 << 20:
        assert 20 <= file.chunks < 30
    else:  # memory comes first
        assert file.chunks > 200
