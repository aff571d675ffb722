"""Change what saves keep from one to the next, and compare with a new Checkpointer's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.distributed.models import Job
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, restored, train
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.tools.diff import Difference, compare

pytestmark = pytest.mark.usefixtures("one_rank")


def fused(job: Job) -> Any:
    """Return FBGEMM's module of the first kernel."""
    return find_kernels(job.model)[0][0].module._emb_module


def write_by_hand(job: Job) -> None:
    with torch.no_grad():
        fused(job).weights_host.add_(1.0)


def move_states(job: Job) -> None:
    momentum = fused(job).momentum1_host
    momentum.data = momentum.data + 1.0


def write_states_by_hand(job: Job) -> None:
    with torch.no_grad():
        fused(job).momentum1_host.add_(1.0)


def dense_of(job: Job) -> KeyedOptimizerWrapper:
    found = dict(job.optimizer.optimizers)["dense"]
    assert isinstance(found, KeyedOptimizerWrapper)
    return found


def exchange_module(job: Job) -> None:
    old = job.model.module.out
    job.model.module.out = nn.Linear(old.in_features, old.out_features)


def add_parameter(job: Job) -> None:
    """Add a parameter to the model, and to the optimizer in a group of its own."""
    job.model.module.extra = nn.Linear(3, 3)
    weight = job.model.module.extra.weight
    dense = dense_of(job)
    dense.params["extra.weight"] = weight
    dense._optimizer.add_param_group({"params": [weight], "lr": 0.25})


def add_buffer(job: Job) -> None:
    job.model.module.register_buffer("seen", torch.arange(5))


def change_dtype(job: Job) -> None:
    job.model.module.hidden.to(torch.float64)


def change_rate(job: Job) -> None:
    dense_of(job).param_groups[0]["lr"] = 0.125


def exchange_states(job: Job) -> None:
    """Replace the dict of a parameter's state, as ``load_state_dict`` does."""
    inner = dense_of(job)._optimizer
    parameter = inner.param_groups[0]["params"][0]
    inner.state[parameter] = {
        name: value + 1 if isinstance(value, torch.Tensor) else value
        for name, value in inner.state[parameter].items()
    }


def exchange_optimizer(job: Job) -> None:
    """Let another optimizer step the same parameters."""
    dense = dense_of(job)
    dense._optimizer = torch.optim.SGD(list(dense.params.values()), lr=0.5, momentum=0.9)
    dense.state, dense.param_groups = dense._optimizer.state, dense._optimizer.param_groups


def hold_a_number(job: Job) -> None:
    dense_of(job).counted = 1


CHANGES = [
    write_by_hand,
    move_states,
    write_states_by_hand,
    exchange_module,
    add_parameter,
    add_buffer,
    change_dtype,
    change_rate,
    exchange_states,
    exchange_optimizer,
    hold_a_number,
]


def is_same(difference: Difference) -> bool:
    return not (
        difference.dense_changed
        or difference.dense_only_before
        or difference.dense_only_after
        or any(table.changed_rows or table.changed_states for table in difference.tables)
    )


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_in_the_next_checkpoint(
    tmp_path: Path, job: Job, change: Callable[[Job], None]
) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver, 2)
        saver.save()
        saver.steps += 1
        before = saver.save()
        change(job)
        saver.steps += 1
        after = saver.save()
        steps = saver.steps
    with checkpointer(tmp_path, job) as fresh:
        fresh.steps = steps + 1
        wanted = fresh.save()
    assert wanted.kind == "full"
    assert not is_same(compare(tmp_path, before.id, after.id))
    assert is_same(compare(tmp_path, after.id, wanted.id))


def test_a_save_right_after_going_back_is_what_a_restart_takes(tmp_path: Path, job: Job) -> None:
    with checkpointer(tmp_path, job) as saver:
        train(job, saver)
        first, wanted = saver.save(), gather(job)
        train(job, saver)
        saver.save()
        assert saver.restore(first.id) is not None
        assert not saver.save().unchanged
        assert saver.save().unchanged
    assert restored(tmp_path, wanted) == []
