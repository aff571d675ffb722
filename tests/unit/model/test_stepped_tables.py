"""Check the hooks on optimizer steps: no cost for other optimizers, no row lost to the cache."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel
from torchrec.distributed.types import ShardingPlan

from tests.unit.tracked_model import Model, modified, train
from torchrec_checknrun.dense.optimizers import is_same_memory
from torchrec_checknrun.marks.intervals import IntervalClock, KeptMarks
from torchrec_checknrun.marks.marks import Marks, PendingRows
from torchrec_checknrun.model.hooks import DataParallelHook
from torchrec_checknrun.tracking import TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def replicas() -> nn.Module:
    """Build the small model with all tables data parallel."""
    torch.manual_seed(0)
    model, sharder = Model(), EmbeddingBagCollectionSharder()
    plans = {name: data_parallel() for name in ("wide", "tall", "split")}
    plan = construct_module_sharding_plan(
        model.ebc, plans, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Count comparisons of parameters with tables."""
    calls: list[object] = []

    def counting(parameter: object, weight: torch.Tensor) -> bool:
        calls.append(parameter)
        return is_same_memory(parameter, weight)

    monkeypatch.setattr("torchrec_checknrun.model.stepped_tables.is_same_memory", counting)
    return calls


def hook_of(tracked: TrackedModel) -> DataParallelHook:
    (hook,) = tracked._hooks
    assert isinstance(hook, DataParallelHook)
    return hook


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = (
                torch.ones_like(parameter) if parameter.grad is None else parameter.grad
            )
    optimizer.step()


def test_other_optimizers_cost_nothing(
    replicas: nn.Module, counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.Adagrad(replicas.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    tracked = track(replicas, [optimizer])
    looks: list[object] = []
    watch = hook_of(tracked).writes
    look = watch._look

    def looking() -> object:
        looks.append(None)
        return look()

    monkeypatch.setattr(watch, "_look", looking)
    step(other)
    counted.clear()
    for _ in range(3):
        step(other)
    assert (counted, looks) == ([], [])
    train(replicas, a=[[3]])
    step(optimizer)
    counted.clear()
    for _ in range(3):
        step(optimizer)
    assert counted == []
    assert len(looks) == 8  # one before and one after each step
    assert modified(tracked) == {"wide": [3]}
    tracked.close()


def test_new_groups_parameters_and_memory_are_noticed(replicas: nn.Module) -> None:
    first, *others = list(replicas.parameters())
    # SGD: before torch 2.12 Adagrad makes no state for a parameter put into a group by hand.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    tracked = track(replicas, [optimizer])
    step(optimizer)  # no cached knowledge of tables
    optimizer.param_groups[0]["params"][0] = first  # the number of parameters is unchanged
    train(replicas, a=[[3]], shared=[[4]])
    step(optimizer)
    assert modified(tracked) == {"wide": [3]}
    optimizer.add_param_group({"params": others})
    step(optimizer)
    assert modified(tracked) == {"wide": [3], "tall": [4], "split": [4]}
    hook = hook_of(tracked)
    assert len(hook.writes.stepped.of(optimizer)) == 3
    for parameter in list(replicas.parameters()):
        parameter.data = parameter.data.clone()  # no longer the kernel's memory
    assert hook.writes.stepped.of(optimizer) == ()
    tracked.close()


def test_options_of_a_group_are_those_of_the_step(replicas: nn.Module) -> None:
    optimizer = torch.optim.Adagrad(replicas.parameters(), lr=0.1)
    tracked = track(replicas, [optimizer])
    train(replicas, a=[[3]])
    step(optimizer)
    assert modified(tracked) == {"wide": [3]}
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step(optimizer)
    assert {len(rows) for rows in modified(tracked).values()} == {30}
    tracked.close()


def test_tables_that_are_stepped_by_hand(
    replicas: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Mark tables that the program updates through ``.data``, and none that it leaves alone."""
    first, second, _ = list(replicas.parameters())
    tracked = track(replicas)
    for _ in range(2):
        train(replicas, a=[[3]], shared=[[4]])
        assert modified(tracked) == {}
        assert first.grad is not None
        first.data.add_(first.grad, alpha=-0.1)
        assert modified(tracked) == {"wide": [*range(30)]}
        replicas.zero_grad()
        tracked.clear()
    assert modified(tracked) == {}
    assert caplog.text.count("without an optimizer") == 1
    train(replicas, a=[[3]], shared=[[4]])
    first.data.zero_()
    tracked.acknowledge_writes()
    assert modified(tracked) == {}
    train(replicas, a=[[3]], shared=[[4]])
    step(torch.optim.Adagrad([first], lr=0.1))
    assert second.grad is not None
    second.data.add_(second.grad, alpha=-0.1)
    assert modified(tracked) == {"wide": [3], "tall": [*range(30)]}
    tracked.close()


def test_ids_of_a_batch_that_is_overwritten_before_the_step(replicas: nn.Module) -> None:
    optimizer = torch.optim.Adagrad(replicas.parameters(), lr=0.1)
    tracked = track(replicas, [optimizer])
    hook, values = hook_of(tracked), torch.tensor([5, 6])
    hook._at_backward(values, [0, 1, 2, 2, 2])
    values.fill_(0)
    assert modified(tracked) == {}
    step(optimizer)
    assert 0 not in [row for rows in modified(tracked).values() for row in rows]
    assert sorted({row for rows in modified(tracked).values() for row in rows}) == [5, 6]
    tracked.close()


def test_gradients_wait_for_their_step(replicas: nn.Module) -> None:
    optimizer = torch.optim.Adagrad(replicas.parameters(), lr=0.1)
    tracked = track(replicas, [optimizer])
    waiting = [tracked.waiting]
    for act in (lambda: None, optimizer.zero_grad, lambda: None, optimizer.step):
        train(replicas, a=[[3]], shared=[[4]])
        act()
        waiting.append(tracked.waiting)
    assert waiting == [False, True, False, True, False]
    assert modified(tracked)["wide"] == [3]
    tracked.close()


@pytest.mark.parametrize("count", [1, 60, 5000, 20000])
def test_pending_rows_are_kept_as_ids_or_marks(count: int) -> None:
    marks = Marks(50, torch.device("cpu"))
    marks.kept = KeptMarks(torch.zeros(51, dtype=torch.uint8), IntervalClock(7))
    pending = PendingRows(marks)
    assert not pending
    ids = torch.arange(count) % 40
    for part in ids.split(7):
        pending.add(part)
    for _ in range(9000):
        pending.add(ids[:0])
    assert pending
    assert sum(map(len, pending._ids)) + len(pending._ids) < 10000
    assert not marks.live.any()
    pending.mark()
    assert not pending
    assert marks.live.nonzero()[:, 0].tolist() == sorted(set(ids.tolist()))
    assert torch.equal(marks.kept.rows, (marks.live != 0) * 7)
    marks.live.zero_()
    pending.mark()
    assert not marks.live.any()


def test_an_optimizer_without_a_hash(replicas: nn.Module) -> None:
    class Odd(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]  # as of a class with an __eq__ of its own

    tracked = track(replicas)
    odd: Any = Odd([nn.Parameter(torch.zeros(2))], lr=0.1)
    step(odd)
    assert hook_of(tracked).writes.stepped.of(odd) == ()
    tracked.close()


def test_parameters_go_with_their_optimizer(replicas: nn.Module) -> None:
    """Hold no memory of other optimizers: they may be of models that come and go."""
    tracked = track(replicas)
    parameter = nn.Parameter(torch.zeros(2))
    gone, optimizer = weakref.ref(parameter), torch.optim.SGD([parameter], lr=0.1)
    step(optimizer)
    assert hook_of(tracked).writes.stepped._known
    del optimizer, parameter
    gc.collect()  # a step's wrapper refers to its optimizer in a cycle
    assert gone() is None
    assert not hook_of(tracked).writes.stepped._known
    tracked.close()
