"""Encode a model and its optimizers as they are, however their memory and parts were replaced since
the last checkpoint: what is kept from one to the next must not hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.unit.tracked_model import make_model
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.snapshot.items import ChunkItem, Items
from torchrec_checknrun.snapshot.snapshot import Declared, take_states
from torchrec_checknrun.tracking import track
from torchrec_checknrun.values.tensor_bytes import RawViews

SIZE = 8


class Job:
    """A sharded model with a dense part, and optimizers of several kinds."""

    def __init__(self) -> None:
        self.model: Any = make_model()
        self.net: Any = nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)
        )
        module: Any = self.model.module
        module.dense = self.net
        self.adam = torch.optim.Adam(self.net[0].parameters(), lr=torch.tensor(0.1))
        self.sgd = torch.optim.SGD(self.net[1].parameters(), lr=0.1, momentum=0.9)
        last = {f"dense.2.{name}": p for name, p in self.net[2].named_parameters()}
        self.keyed = KeyedOptimizerWrapper(last, lambda ps: torch.optim.Adagrad(ps, lr=0.1))
        self.combined = CombinedOptimizer([self.model.fused_optimizer, self.keyed])
        self.states: dict[str, Any] = {
            "adam": self.adam,
            "sgd": self.sgd,
            "combined": self.combined,
        }
        self.train()

    def train(self) -> None:
        self.net(torch.randn(4, SIZE)).square().sum().backward()
        for optimizer in (self.adam, self.sgd, self.keyed):
            optimizer.step()
            optimizer.zero_grad()


def encoded(job: Job, tracked: TrackedModel, views: RawViews | None) -> dict[str, Any]:
    tracked.refresh()
    snapshot = take_states(job.model, tracked, Declared(job.states), refreshed=True)
    items = Items.of(snapshot, Quantization(), 1 << 20, views)
    return {
        name: (item.chunk.entry, b"".join(map(bytes, item.chunk.pieces)))
        for name, item in items.by_name.items()
        if isinstance(item, ChunkItem)
    }


def state_of(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = job.adam.state[job.net[0].weight]
    return found


def replace_state(job: Job) -> None:
    state_of(job)["exp_avg"] = torch.full((SIZE, SIZE), 3.0)


def replace_states(job: Job) -> None:
    job.adam.state[job.net[0].weight] = {k: v + 1 for k, v in state_of(job).items()}


def transpose_state(job: Job) -> None:
    state_of(job)["exp_avg"].t_()


def other_type(job: Job) -> None:
    state_of(job)["exp_avg"] = state_of(job)["exp_avg"].view(torch.int32)


def move_state(job: Job) -> None:
    state_of(job)["exp_avg"].data = torch.full((SIZE, SIZE), 5.0)


def other_type_of_state(job: Job) -> None:
    state_of(job)["exp_avg"].data = state_of(job)["exp_avg"].data.view(torch.int32)


def flatten_state(job: Job) -> None:
    state_of(job)["exp_avg"].resize_(SIZE * SIZE)


def overlap_state(job: Job) -> None:
    state_of(job)["exp_avg"].as_strided_((SIZE // 2, 2 * SIZE), (SIZE, 1))


def shrink_state(job: Job) -> None:
    state_of(job)["exp_avg"] = state_of(job)["exp_avg"][: SIZE // 2]


def add_group(job: Job) -> None:
    job.sgd.add_param_group({"params": list(job.net[2].parameters()), "lr": 0.5})
    job.train()


def lose_state(job: Job) -> None:
    job.sgd.state.pop(job.net[1].weight, None)


def tensor_rate(job: Job) -> None:
    job.adam.param_groups[0]["lr"].fill_(0.7)


def rate(job: Job) -> None:
    job.sgd.param_groups[0]["lr"] = 0.7


def schedule(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(job.adam, 1)
    job.train()
    scheduler.step()


def load(job: Job) -> None:
    job.adam.load_state_dict(job.adam.state_dict())
    job.train()


def swap_inner(job: Job) -> None:
    job.keyed._optimizer = torch.optim.Adam(job.net[2].parameters(), lr=0.3)
    job.keyed.state = job.keyed._optimizer.state
    job.keyed.param_groups = job.keyed._optimizer.param_groups
    job.train()


def swap_optimizer(job: Job) -> None:
    job.states["adam"] = torch.optim.RMSprop(job.net[0].parameters())
    job.adam = job.states["adam"]
    job.train()


def swap_module(job: Job) -> None:
    job.net[2] = nn.Linear(SIZE, SIZE)


def swap_parameter(job: Job) -> None:
    job.net[2].weight = nn.Parameter(torch.ones(SIZE, SIZE))


def new_data(job: Job) -> None:
    job.net[2].weight.data = torch.ones(SIZE, SIZE)


def transpose_data(job: Job) -> None:
    job.net[2].weight.data = job.net[2].weight.data.t()


def other_type_of_data(job: Job) -> None:
    job.net[1].running_mean.data = job.net[1].running_mean.data.view(torch.int32)


def register_buffer(job: Job) -> None:
    job.net[1].register_buffer("running_mean", torch.full((SIZE,), 4.0))


def forget_buffer(job: Job) -> None:
    job.net[1].register_buffer("running_mean", torch.ones(SIZE), persistent=False)


def convert(job: Job) -> None:
    job.net.double()


def look_up(job: Job) -> None:
    job.net(torch.randn(4, SIZE))  # batch normalisation's buffers change in forward


ACTIONS: list[Callable[[Job], None]] = [
    Job.train,
    replace_state,
    replace_states,
    transpose_state,
    other_type,
    move_state,
    other_type_of_state,
    flatten_state,
    overlap_state,
    shrink_state,
    add_group,
    lose_state,
    tensor_rate,
    rate,
    schedule,
    load,
    swap_inner,
    swap_optimizer,
    swap_module,
    swap_parameter,
    new_data,
    transpose_data,
    other_type_of_data,
    register_buffer,
    forget_buffer,
    convert,
    look_up,
]
ONCE = (
    add_group,
    transpose_state,
    other_type,
    move_state,
    other_type_of_state,
    flatten_state,
    overlap_state,
    shrink_state,
    other_type_of_data,
)
"""Actions that can't be done twice."""


@pytest.mark.usefixtures("group")
def test_whatever_was_replaced_is_noticed() -> None:
    for act in ACTIONS:
        torch.manual_seed(0)
        job, views = Job(), RawViews()
        tracked = track(job.model, list(job.states.values()))
        for turn in range(2):
            before = encoded(job, tracked, views)
            act(job)
            found = encoded(job, tracked, views)
            assert turn or found != before, f"{act.__name__} changes nothing"
            again = track(job.model, list(job.states.values()))
            assert found == encoded(job, again, None), act.__name__
            again.close()
            if act in ONCE:
                break
        tracked.close()
