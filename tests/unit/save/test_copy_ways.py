"""Choose again how a shard's rows are copied whenever something that matters has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.unit.tracked_model import TALL, make_model, only
from torchrec_checknrun.model import kernels
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.save.copy_ways import CopyWays
from torchrec_checknrun.tracking import TrackedModel, track


@pytest.fixture
def tracked(group: None) -> Iterator[TrackedModel]:
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    made = track(make_model())
    yield made
    made.close()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def move(tracked: TrackedModel, form: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    """Move the memory of the tall table's kernel, in another form for that table."""
    kernel = only(tracked, TALL).writes.kernel
    weights, states = [], []
    for shard in kernel.shards:
        tall = shard.table == TALL
        weights.append(form(shard.weight) if tall and what == "weight" else shard.weight.clone())
        own = form if tall and what == "states" else torch.clone
        states.append({name: own(state) for name, state in shard.optimizer.items()})
    kernel._set(weights, states)


def move_weight(tracked: TrackedModel) -> None:
    move(tracked, strided, "weight")


def move_states(tracked: TrackedModel) -> None:
    move(tracked, strided, "states")


def write_outside(tracked: TrackedModel) -> None:
    only(tracked, TALL).writes.spoils = True


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (move_weight, "not in one piece"),
        (move_states, "not in one piece"),
        (write_outside, "rows outside of training"),
    ],
)
def test_changes_are_noticed(
    tracked: TrackedModel, act: Callable[[TrackedModel], None], why: str
) -> None:
    ways = CopyWays(later=True, on_write=True)
    before = ways.of(tracked.shards)
    assert [way.at_cut for way in before] == [None] * len(before)
    act(tracked)
    after = ways.of(tracked.shards)
    tall = only(tracked, TALL)
    assert why in str(after[tracked.shards.index(tall)].at_cut)
    for shard, old, new in zip(tracked.shards, before, after, strict=True):
        assert (new is old) == (shard.writes is not tall.writes)


def test_tables_of_which_other_rows_change_are_copied_at_the_cut(
    tracked: TrackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook announces these rows, so none would copy them before they change."""
    monkeypatch.setattr(kernels, "_TOUCHES_LOOKED_UP_ROWS_ONLY", frozenset())
    other = track(make_model())
    ways = CopyWays(later=True, on_write=True).of(other.shards)
    assert {way.at_cut for way in ways} == {"its kernel changes rows that were not looked up"}
    other.close()


def test_a_shard_that_has_come_again_is_looked_at_again(tracked: TrackedModel) -> None:
    ways = CopyWays(later=True, on_write=True)
    ways.of(tracked.shards)
    ways.of(tracked.shards[:1])
    move(tracked, strided, "states")
    assert any(way.at_cut is not None for way in ways.of(tracked.shards))


def test_a_shard_that_is_gone_is_not_kept(group: None) -> None:
    ways = CopyWays(later=True, on_write=True)
    tracked = track(make_model())
    ways.of(tracked.shards)
    gone = weakref.ref(tracked.shards[0])
    tracked.close()
    del tracked
    gc.collect()
    assert gone() is None


def test_without_memory_all_are_copied_at_the_cut(tracked: TrackedModel) -> None:
    for way in CopyWays(later=True, on_write=False).of(tracked.shards):
        assert way.at_cut == "memory_budget is too small"
