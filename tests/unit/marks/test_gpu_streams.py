"""Order what checkpoints do on a GPU among its streams; the GPU is a stand-in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from tests.unit.fake_gpu import DEVICE, FakeGpu, GpuTensor, Stream, gpu
from tests.unit.tracked_model import TALL, make_model, only, train
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.gpu_streams import GpuReads
from torchrec_checknrun.marks.layers import Layer
from torchrec_checknrun.marks.marks import Marks, PendingRows
from torchrec_checknrun.tracking import track

pytestmark = pytest.mark.usefixtures("group")
__all__ = ["gpu"]


# Prefetches


class Prefetched:
    """A tracked model with a cache before each kernel's tables, which a pipeline fills."""

    def __init__(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.model = gpu, make_model()
        self.stream = Stream(gpu)
        self.order: list[str] = []
        self.stream.queue(lambda: self.order.append("prefetch"))
        self.tracked = track(self.model)
        self.kernels = self.tracked._kernels()
        for kernel in self.kernels:
            kernel.module._emb_module.prefetch_stream = self.stream
            kernel.module._emb_module.lxu_cache_weights = torch.zeros(8)
            for name in ("flush", "purge"):
                monkeypatch.setattr(kernel.module, name, self._named(name))

    def _named(self, name: str) -> Callable[[], None]:
        return lambda: self.gpu.current.queue(lambda: self.order.append(name))


@pytest.fixture
def prefetched(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefetched]:
    made = Prefetched(gpu, monkeypatch)
    yield made
    made.tracked.close()


@pytest.mark.parametrize("name", ["flush", "purge"])
def test_the_cache_is_left_alone_while_rows_are_prefetched(
    gpu: FakeGpu, prefetched: Prefetched, name: str
) -> None:
    getattr(prefetched.tracked.shards[0].writes, name)()
    assert prefetched.order == ["prefetch", name]
    stream, event = gpu.waits[-1]
    assert (stream, event.stream) == (prefetched.stream, gpu.training)  # so do later prefetches
    assert event._at == gpu.training.queued


@pytest.mark.parametrize("locked", [True, False])
def test_batches_in_a_cache_that_is_purged_are_looked_up_in_memory(
    prefetched: Prefetched, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """Give places of the cache to other rows, while two batches wait that know the old ones."""
    kernel = prefetched.kernels[0]
    tbe: Any = kernel.module._emb_module
    locks = torch.tensor([2, 1, 1])
    tbe.prefetch_pipeline, tbe.lxu_cache_locking_counter = locked, locks
    tbe.lxu_cache_locations_list = [torch.tensor([0, 1]), torch.tensor([0, -1])]

    def unlock(counter: torch.Tensor, places: torch.Tensor) -> None:
        counter[places[places >= 0]] -= 1

    # FBGEMM 1.4 has it on a GPU only.
    monkeypatch.setattr(
        torch.ops.fbgemm, "lxu_cache_locking_counter_decrement", unlock, raising=False
    )
    watches = [shard.writes for shard in prefetched.tracked.shards]
    next(watch for watch in watches if watch.kernel is kernel).purge()
    assert [places.tolist() for places in tbe.lxu_cache_locations_list] == [[-1, -1], [-1, -1]]
    assert locks.tolist() == ([0, 0, 1] if locked else [2, 1, 1])  # a batch in training keeps its


def test_prefetches_wait_until_rows_are_copied(gpu: FakeGpu, prefetched: Prefetched) -> None:
    watch = only(prefetched.tracked, TALL).writes
    reads = GpuReads(DEVICE)
    with reads.queued():
        gpu.current.queue(lambda: None)
    before = len(gpu.waits)
    watch.follow(reads)
    done: Any = reads.done
    assert gpu.waits[before:] == [(gpu.training, done), (prefetched.stream, done)]
    assert watch.reads is None  # nobody can write before the copies are made


# Updates on other streams


def test_a_cut_waits_for_updates_on_another_stream(gpu: FakeGpu) -> None:
    """The update of rows, and the marks that tell of it, are queued where the lookup was."""
    model = make_model()
    tracked = track(model)
    lookups = Stream(gpu)
    with torch.cuda.stream(cast("Any", lookups)):
        train(model, a=[[1]], shared=[[2]], b=[[3]])
    lookups.queue(lambda: None)
    tracked.refresh()
    assert lookups.done == lookups.queued
    watch, reads = only(tracked, TALL).writes, GpuReads(DEVICE)
    with reads.queued():
        pass
    watch.spoils = True  # so that training is to wait at once
    watch.follow(reads)
    done: Any = reads.done
    assert (lookups, done) in gpu.waits
    tracked.close()


class Uncopied(Stream):
    """A stream that can't be copied, as CUDA's."""

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a stream")


def test_a_model_with_such_streams_can_be_copied(gpu: FakeGpu) -> None:
    model = make_model()
    tracked = track(model)
    with torch.cuda.stream(cast("Any", Uncopied(gpu))):
        train(model, a=[[1]], shared=[[2]], b=[[3]])
    watch = only(tracked, TALL).writes
    assert watch.streams is not None
    copied = copy.deepcopy({"streams": watch.streams}, {id(watch.kernel): watch.kernel})
    copied["streams"].join()
    tracked.close()


# Copies


class Table:
    """A watch on a table that is written by hand or not."""

    def __init__(self) -> None:
        self.reads: GpuReads | None = None
        self.written = False

    def is_written(self) -> bool:
        return self.written

    def spoil(self) -> None:
        if self.reads is not None:
            self.reads.fail(SaveFailed("written"))


@pytest.fixture
def reads(gpu: FakeGpu) -> GpuReads:
    made = GpuReads(DEVICE)
    with made.queued() as event:
        for _ in range(3):
            gpu.current.queue(lambda: None)
            vars(made).setdefault("events", []).append(event())
    return made


def events(reads: GpuReads) -> list[Any]:
    found: list[Any] = vars(reads)["events"]
    return found


def test_a_write_fails_copies_that_are_not_made_yet(reads: GpuReads) -> None:
    table = Table()
    reads.watch(table)
    reads.wait(events(reads)[0])
    table.written = True
    with pytest.raises(SaveFailed, match="written"):
        reads.wait(events(reads)[1])


def test_a_write_after_the_copies_is_none_of_their_business(reads: GpuReads) -> None:
    table = Table()
    reads.watch(table)
    for event in (*events(reads), events(reads)[-1]):
        reads.wait(event)
    table.written = True
    reads.finish()
    assert table.reads is None
    assert not reads.fail(SaveFailed("written"))


def test_a_write_that_is_counted_late_is_seen(reads: GpuReads) -> None:
    """PyTorch counts a write only after it is queued: the last copy may be made in between."""
    table = Table()
    reads.watch(table)
    for event in events(reads):
        reads.wait(event)
    table.written = True
    with pytest.raises(SaveFailed, match="written"):
        reads.finish()


def test_copies_queued_before_an_error_are_known(gpu: FakeGpu) -> None:
    reads = GpuReads(DEVICE)

    def interrupt() -> None:
        with reads.queued():
            gpu.current.queue(lambda: None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert reads.done is not None
    assert not reads.done.query()


def test_a_watch_is_followed_no_more_once_its_copies_are_over(reads: GpuReads) -> None:
    reads.end()
    table = Table()
    reads.watch(table)
    assert table.reads is None


# Marks


def test_marks_are_awaited_on_their_device(gpu: FakeGpu) -> None:
    layer = Layer(4, torch.ones(5, dtype=torch.uint8).as_subclass(GpuTensor))
    assert layer.hold() is not None
    assert gpu.synchronized == [DEVICE]


@pytest.mark.parametrize("passes", [1, 5000])
def test_pending_rows_are_kept_until_they_are_marked(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Gather ids on the lookup's stream, whose next tensors take their memory; mark at the step."""
    kept: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        GpuTensor, "record_stream", lambda ids, stream: kept.append((ids.data_ptr(), stream))
    )
    pending = PendingRows(Marks(4, DEVICE))
    lookups, ids = Stream(gpu), torch.tensor([1, 3]).as_subclass(GpuTensor)
    with torch.cuda.stream(cast("Any", lookups)):
        for _ in range(passes):
            pending.add(ids)
    assert all(stream is lookups for _, stream in kept)
    before = len(kept)
    pending.mark()
    assert (ids.data_ptr(), gpu.training) in kept[before:]
