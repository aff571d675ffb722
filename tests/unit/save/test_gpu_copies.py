"""Change tables while their rows are still copied from a GPU; the GPU is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fake_gpu import FakeGpu, gpu
from tests.unit.tracked_model import TALL, WIDE, make_model, only, table, train
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save import background
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.memory import Ring, StagingMemory
from torchrec_checknrun.snapshot.snapshot import Snapshot, take_rows
from torchrec_checknrun.snapshot.staging import Staging
from torchrec_checknrun.tracking import Consumer, TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")
__all__ = ["gpu"]


class Run:
    """A model that is trained and saved."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.model = make_model()
        options.setdefault("policy", Consecutive())
        self.saver = Checkpointer(root, model=self.model, **options)

    @property
    def tracked(self) -> TrackedModel:
        return self.saver._target.tracked

    def train(self) -> None:
        train(self.model, a=[[1, 2]], shared=[[3, 4]], b=[[5]])

    def write_by_hand(self, name: str = TALL) -> None:
        with torch.no_grad():
            dict(self.model.named_parameters())[f"{name}.weight"][3] += 1

    def tables(self) -> dict[str, torch.Tensor]:
        return {name: table(self.model, name) for name in (WIDE, TALL)}

    def restored(self, name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the tables as another model finds them in a checkpoint."""
        model: nn.Module = make_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        with Checkpointer(self.root, model=model) as other:
            assert other.restore(name) is not None
        return {name: table(model, name) for name in (WIDE, TALL)}


@pytest.fixture
def run(gpu: FakeGpu, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.saver._release(failed=True)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


class Growing:
    """A state of any size, kept in the CPU's memory."""

    size = 1

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(self.size, dtype=torch.uint8)}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.size = len(content["x"])
        assert bool((content["x"] == 1).all())


def fail_at_once(*_: Any) -> Any:
    raise SaveFailed("another rank has failed")


def fail_by_a_write(gpu: FakeGpu, run: Run) -> None:
    """Write by hand while a checkpoint is copied, and see it fail."""
    with gpu.held():
        run.saver.save(wait=False)
        run.write_by_hand()
    with pytest.raises(SaveFailed, match=r"tall were written outside of training .*writing\("):
        run.saver.wait()


def test_an_update_waits_for_the_copies(gpu: FakeGpu, run: Run) -> None:
    with gpu.held():
        run.saver.save(wait=False)
        wanted = run.tables()
        run.train()
    run.saver.wait()
    assert_equal(run.restored(), wanted)


def test_a_write_by_hand_in_the_middle_fails_the_checkpoint(gpu: FakeGpu, run: Run) -> None:
    fail_by_a_write(gpu, run)
    run.train()  # which goes on
    run.saver.save()
    assert_equal(run.restored(), run.tables())


def test_after_such_a_write_training_waits_at_the_cut(gpu: FakeGpu, run: Run) -> None:
    fail_by_a_write(gpu, run)
    with gpu.held():
        run.saver.save(wait=False)
        wanted = run.tables()
        run.write_by_hand()
    run.saver.wait()
    assert_equal(run.restored(), wanted)
    assert run.saver.save().modified_fraction > 0  # the rows written meanwhile
    assert_equal(run.restored(), run.tables())


def test_a_write_that_is_noticed_before_the_copies_are_made_counts(gpu: FakeGpu, run: Run) -> None:
    with gpu.held():
        run.saver.save(wait=False)
        run.write_by_hand()
        assert run.tracked.is_modified(Consumer.LAST)  # which looks, and takes note
    with pytest.raises(SaveFailed, match="tall were written outside of training"):
        run.saver.wait()


def write_rows(run: Run) -> None:
    shard = only(run.tracked, TALL)
    shard.write_rows([1], shard.read_rows([1]).weight + 1)


def write_announced(run: Run) -> None:
    with run.saver.writing(TALL, [3]):
        run.write_by_hand()


def overwrite(run: Run) -> None:
    only(run.tracked, TALL).mark_all(everywhere=True)
    run.write_by_hand()  # not yet acknowledged


@pytest.mark.parametrize("write", [write_rows, write_announced, overwrite])
def test_announced_writes_wait_for_the_copies(
    gpu: FakeGpu, run: Run, write: Callable[[Run], None]
) -> None:
    with gpu.held():
        run.saver.save(wait=False)
        wanted = run.tables()
        write(run)
    run.saver.wait()
    assert_equal(run.restored(), wanted)
    run.saver.save()
    assert_equal(run.restored(), run.tables())


def test_copies_of_a_failed_save_come_into_no_other(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Growing()
    run = Run(tmp_path, state={"growing": state})
    with monkeypatch.context() as patch:
        patch.setattr(background, "save_checkpoint", fail_at_once)
        with pytest.raises(SaveFailed, match="another rank"):
            run.saver.save()
    assert gpu.streams[0].done < gpu.streams[0].queued
    for shard in run.tracked.shards:
        shard.writes.read = None  # the stand-in would have the host wait, and not only the stream
    state.size = 3000  # where rows were to come
    run.saver.save()
    run.saver.close()
    found = Growing()
    with Checkpointer(tmp_path, model=make_model(), state={"growing": found}) as other:
        assert other.restore() is not None
    assert found.size == state.size


def test_memory_is_kept_until_the_copies_are_made(
    gpu: FakeGpu, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "save_checkpoint", fail_at_once)
    with pytest.raises(SaveFailed, match="another rank"):
        run.saver.save()
    assert gpu.streams[0].done < gpu.streams[0].queued
    run.saver.close()
    assert (gpu.pinned, gpu.released_early) == ({}, 0)


def test_memory_of_unwanted_items_is_kept_until_they_are_copied(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, _ = take_rows(track(make_model()), None)
    snapshot = Snapshot(snapshots, {}, {})
    items = Items.of(snapshot, Quantization(), 1 << 20)
    ring = Ring(1 << 20)
    staging = Staging(StagingMemory(1 << 20, pinned=True), ring, items, frozenset())
    staging.run(lambda: None)
    last = list(items.by_name)[-1]
    (side,) = gpu.streams
    made: list[int] = []
    monkeypatch.setattr(ring, "release", lambda at: made.append(side.done))
    assert not side.done
    staging.choose(frozenset([last]))
    assert len(made) == len(items.by_name) - 1
    assert all(made)
