"""Copy parameters and optimizer state before the next step, whoever makes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tests.crash.save_sweep import SPEC
from tests.distributed.models import Job, uniform_plan
from tests.distributed.on_write import build, checkpointer
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveFailed, UnsupportedState
from torchrec_checknrun.model.dense_states import SnapshotOptimizers
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.snapshot.late_copies import LEAST_BYTES, LateCopies, stepped_memory
from torchrec_checknrun.tracking import track
from torchrec_checknrun.values.tensor_bytes import raw_bytes

VALUES = LEAST_BYTES // 4


class Copied:
    """A parameter and its copy, which is to be made."""

    def __init__(self, values: int = VALUES) -> None:
        self.parameter = nn.Parameter(torch.arange(values, dtype=torch.float32))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.at_cut = self.parameter.detach().clone()
        self.copy = torch.zeros(4 * values, dtype=torch.uint8)
        self.late = LateCopies(stepped_memory([self.parameter.detach()]))
        assert self.late.add(raw_bytes(self.parameter), self.copy)
        self.late.begin()

    def step(self) -> None:
        self.parameter.grad = torch.ones(VALUES)
        self.optimizer.step()

    @property
    def is_of_cut(self) -> bool:
        return torch.equal(self.copy.view(torch.float32), self.at_cut)


@pytest.fixture
def copied() -> Iterator[Copied]:
    found = Copied()
    yield found
    found.late.end()


def test_a_step_makes_the_copies_first(copied: Copied) -> None:
    copied.step()
    assert not torch.equal(copied.parameter, copied.at_cut)
    assert copied.is_of_cut
    copied.late.make()  # finds nothing left
    copied.step()
    assert copied.is_of_cut
    assert copied.late.seconds > 0


def test_a_compiled_step_makes_them_as_well() -> None:
    """Leave the copies to Python: compiled, they were taken for writes by hand, or failed."""
    torch.compiler.reset()
    other = nn.Parameter(torch.ones(3))
    step = torch.compile(torch.optim.Adam([other]).step, backend="eager")
    for values in (VALUES, 2 * VALUES, 3 * VALUES):
        copied = Copied(values)
        other.grad = torch.ones(3)
        step()
        copied.parameter.data.zero_()
        copied.late.make()  # finds nothing left
        assert copied.is_of_cut
    torch.compiler.reset()


def test_any_optimizer_s_step_will_do(copied: Copied) -> None:
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.Adam([other]).step()
    assert copied.is_of_cut


def test_the_background_makes_them(copied: Copied) -> None:
    copied.late.make()
    assert copied.is_of_cut
    copied.step()
    assert copied.is_of_cut
    assert not copied.late.spoiled


def test_a_write_by_hand_is_told(copied: Copied) -> None:
    with torch.no_grad():
        copied.parameter.mul_(2)
    with pytest.raises(SaveFailed, match="was written while it was being saved"):
        copied.late.make()
    assert copied.late.spoiled


def test_a_write_by_hand_before_a_step_is_told(copied: Copied) -> None:
    with torch.no_grad():
        copied.parameter.mul_(2)
    copied.step()  # which raises nothing
    with pytest.raises(SaveFailed, match="was written while it was being saved"):
        copied.late.make()


@pytest.mark.parametrize("values", [VALUES, VALUES + 1])
def test_a_write_past_the_version_counter_is_told(values: int) -> None:
    """Tell of writes through ``.data``, as libraries that average weights swap these in by."""
    copied = Copied(values)
    average = torch.full_like(copied.at_cut, 0.5)
    copied.parameter.data.copy_(average)
    with pytest.raises(SaveFailed, match="was written while it was being saved"):
        copied.late.make()
    copied = Copied(values)
    copied.parameter.data.copy_(average)
    copied.parameter.data.copy_(copied.at_cut)
    copied.late.make()
    assert copied.is_of_cut


@pytest.mark.parametrize("row", [0, 7, 1234, 4095])
def test_single_rows_of_what_no_optimizer_steps_are_looked_at(row: int) -> None:
    """Tell of a row that is written through ``.data``, as codebooks are within forward passes."""
    codes = nn.Parameter(torch.zeros(4096, 32), requires_grad=False)
    late = LateCopies(stepped_memory([codes.detach()]), {codes.data_ptr()})
    assert late.add(raw_bytes(codes), torch.zeros(codes.nbytes, dtype=torch.uint8))
    codes.data[row] += 1
    with pytest.raises(SaveFailed, match="was written while it was being saved"):
        late.make()


class NoTable:
    """Stands for the watch of a data-parallel table."""

    late: object = None


@pytest.mark.parametrize("shape", [(2500, 8), (2500, 3), (2500,), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_from_all_over_a_table_are_copied_and_looked_at(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Compare rows that don't lie side by side, as those that ranks compare, with their copy."""
    table = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    for written in (False, True):
        rows = table[::3]
        copy = torch.empty_like(rows, memory_format=torch.contiguous_format)
        late = LateCopies({})
        late.add_table(NoTable(), [table, rows], [torch.empty_like(table), copy])  # type: ignore[arg-type]  # a stand-in
        if written:
            table.data.add_(1)
            with pytest.raises(SaveFailed, match="was written while it was being saved"):
                late.make()
        else:
            late.make()
            assert torch.equal(copy, rows)


def test_a_table_without_rows_on_this_rank_is_copied() -> None:
    late, none = LateCopies({}), torch.empty(0, 8)
    rows = [none, none[::3], none[:, 0]]
    late.add_table(NoTable(), rows, [each.clone() for each in rows])  # type: ignore[arg-type]  # a stand-in
    late.make()


def test_memory_that_was_moved_is_not_read(copied: Copied) -> None:
    copied.parameter.data.share_memory_()  # frees the memory of before, unseen by counters
    with pytest.raises(SaveFailed, match="was written while it was being saved"):
        copied.late.make()
    assert not copied.copy.any()


def test_memory_that_was_replaced_is_as_of_the_cut(copied: Copied) -> None:
    copied.parameter.data = torch.zeros(VALUES)
    copied.step()
    assert copied.is_of_cut


def test_copies_that_were_given_up_are_not_made(copied: Copied) -> None:
    copied.late.end()
    copied.step()
    assert not copied.copy.any()


def test_what_is_copied_at_once() -> None:
    small, other = torch.zeros(VALUES - 1), torch.zeros(VALUES)
    with torch.inference_mode():
        uncounted = torch.zeros(VALUES)
    assert stepped_memory([small, uncounted, other[::2].expand(2, -1)]) == {}
    late = LateCopies(stepped_memory([other]))
    target = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    assert not late.add(raw_bytes(torch.zeros(VALUES)), target)
    assert late.add(raw_bytes(other), target)


def test_one_hook_stays_for_all() -> None:
    """Add no hook for each checkpoint, and remove none while another thread walks over them."""
    Copied().late.make()
    hooks: Any = torch_optimizer._global_optimizer_pre_hooks
    before = list(hooks)
    for _ in range(5):
        copied = Copied()
        copied.step()
        copied.late.end()
    assert list(hooks) == before


def test_steps_and_the_background_at_once() -> None:
    for _ in range(200):
        copied = Copied()
        background = threading.Thread(target=copied.late.make)
        background.start()
        copied.step()
        background.join()
        assert copied.is_of_cut
        copied.late.end()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that late copies, of tensors of any size, wait for."""
    monkeypatch.setattr("torchrec_checknrun.snapshot.late_copies.LEAST_BYTES", 1)
    monkeypatch.setattr("torchrec_checknrun.snapshot.staging.LEAST_BYTES", 1)
    go, make = threading.Event(), LocalPart.make_late_copies

    def wait_and_make(part: LocalPart) -> None:
        assert go.wait(60)
        make(part)

    monkeypatch.setattr(LocalPart, "make_late_copies", wait_and_make)
    return go


def dense_parameter(job: Job) -> torch.Tensor:
    return next(p for n, p in job.model.named_parameters() if "embedding" not in n)


@pytest.mark.usefixtures("one_rank")
def test_after_a_write_by_hand_everything_is_copied_at_the_cut(
    tmp_path: Path, held: threading.Event
) -> None:
    job = build()
    dense = dense_parameter(job)
    saver = checkpointer(tmp_path, job)
    job.train()
    for failing in (True, False):
        held.clear()
        saver.save(wait=False)
        with torch.no_grad():
            dense.mul_(2)
        held.set()
        if failing:
            with pytest.raises(SaveFailed, match="was written while it was being saved"):
                saver.wait()
        else:
            assert saver.wait() is not None
        saver.steps += 1
    saver.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ends", [False, True])
def test_training_goes_on_after_a_write_by_hand(
    tmp_path: Path, held: threading.Event, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """Lose that checkpoint with a warning, and end with an error only if none comes after it."""
    job = build()
    saver = checkpointer(tmp_path, job, every_steps=2)
    job.train()
    job.train()
    saver.step()
    saver.step()
    average = dense_parameter(job).detach() / 2
    dense_parameter(job).data.copy_(average)
    held.set()
    while not saver._saver.running.done:  # type: ignore[union-attr]  # one is running
        time.sleep(0.001)
    assert saver.step() is None
    assert "was written while it was being saved" in caplog.text
    if ends:
        with pytest.raises(SaveFailed, match="was written while it was being saved"):
            saver.close()
        return
    saver.step()
    dense_parameter(job).data.zero_()
    report = saver.wait()
    assert report is not None
    assert report.step == 4
    saver.close()
    again = build()
    with checkpointer(tmp_path, again) as reader:
        assert reader.restore() is not None
    assert torch.equal(dense_parameter(again), average)


class Holder:
    """An object that holds an optimizer, and stores what it likes."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.usefixtures("one_rank")
def test_which_parameters_no_optimizer_steps() -> None:
    job = build()
    dense = {n: p for n, p in job.model.named_parameters() if "embedding" not in n}
    frozen = dense["out.weight"]

    def unstepped(**states: Any) -> set[str]:
        finder = SnapshotOptimizers(job.model, states)
        with_track = track(job.model, states.values())
        found = finder.find(with_track, with_track.dense.find()).unstepped
        with_track.close()
        return {name for name, p in dense.items() if p.data_ptr() in found}

    assert unstepped() == set(dense)
    assert unstepped(optimizer=job.optimizer) == set()
    assert unstepped(trainer=Holder(job.optimizer)) == set()
    frozen.requires_grad_(False)
    assert unstepped(optimizer=job.optimizer) == {"out.weight"}


class Odd:
    """A state that can't be stored while ``value`` is no number."""

    value: object = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.usefixtures("one_rank")
def test_a_save_that_fails_at_the_cut_gives_its_copies_up(tmp_path: Path) -> None:
    """Take later writes by hand for no writes during a save, and keep no copy of the tables."""
    job = Job.build(SPEC, uniform_plan(SPEC, "data_parallel", 1))
    odd = Odd()
    state = {"optimizer": job.optimizer, "odd": odd}
    with Checkpointer(tmp_path, model=job.model, state=state) as saver:
        watches = [shard.writes for shard in saver._target.tracked.shards]
        odd.value = lambda: None
        job.train()
        with pytest.raises(UnsupportedState):
            saver.save()
        assert [watch.late for watch in watches] == [None] * len(watches)
        job.train()
        for watch in watches:
            watch.before_overwriting()
        odd.value = 2
        saver.save()
        late = saver._saver._background.memory._late
        assert late is not None
        assert not late.spoiled
