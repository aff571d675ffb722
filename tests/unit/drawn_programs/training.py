"""Train a drawn program: build its model and optimizers anew, and do its turns."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.layouts import Layout, generator_of
from tests.distributed.zoo import CPU, FUSED, ZooBatch
from tests.unit.drawn_programs import habits, nets, schedules
from tests.unit.drawn_programs.optimizers import Optimizers
from tests.unit.drawn_programs.programs import PIPELINES, STEPS, Program
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.memory.gradient_buckets import settle_buckets

PLANS = {"table_wise": "table_wise:0", "row_wise": "row_wise", "column_wise": "column_wise:0,0"}
KINDS = {"pipeline_base": TrainPipelineBase, "pipeline_sparse": TrainPipelineSparseDist}


def alone(program: Program) -> Layout:
    """Return the layout of a program on one rank."""
    plan = dict.fromkeys(nets.ROWS, PLANS[program.sharding])
    if program.replica:
        plan["t2"] = "data_parallel"
    return Layout(plan, world_size=1)


class Place:
    """The position in the data, counted in batches that were trained, and the losses so far."""

    def __init__(self) -> None:
        self.position = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.losses = state["position"], list(state["losses"])


def mean_of_ranks(value: torch.Tensor) -> float:
    """Return the mean of all ranks' values, as training loops log it and schedules take it."""
    found = value.detach().clone()
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Training:
    """A program's objects, and its loop.

    Args:
        seed: of the first values, and of the generators.
        at: the turn that comes next after a restore, which programs of optimizers that grow know.
        layout: the shardings by table, and the ranks; by default one rank's, by the program.
    """

    def __init__(
        self, program: Program, seed: int, at: int = 0, layout: Layout | None = None
    ) -> None:
        seed_all(seed)
        self.program = program
        self.model = self._sharded(layout or alone(program), seed)
        if dist.get_world_size() > 1:  # else a restart sums up gradients in another order
            settle_buckets(self.model)
        found = self.model.named_parameters()
        named = dict(found if program.over_all else in_backward_optimizer_filter(found))
        self.optimizers = Optimizers(
            program.dense, program.wrapper, self.model.fused_optimizer, self._at_first(named)
        )
        self.place = Place()
        self.state: dict[str, Any] = {"place": self.place, **self.optimizers.state}
        if program.change == "added_group" and at > habits.CHANGED:
            self.add_group()
        self.schedules = schedules.made(program.schedule, self.optimizers)
        self.state |= {f"schedule{i}": each for i, each in enumerate(self.schedules)}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        if program.loop == "scaled":
            self.state["scaler"] = self.scaler
        self.habit = habits.made(program, self)
        if program.extra in ("late_buffer", "observed"):
            with torch.no_grad():
                self.model(self.batch(0))
        self.progress = self._pipeline() if program.loop in PIPELINES else None

    def _sharded(self, layout: Layout, seed: int) -> Any:
        # Groups within and across nodes are kept for the process; an earlier one's may be gone.
        torchrec_comm._INTRA_PG = torchrec_comm._CROSS_PG = None
        os.environ["LOCAL_WORLD_SIZE"] = str(layout.ranks_per_node)
        program, plan = self.program, layout.plan
        module, collection, sharder = nets.embeddings(program)
        kinds = dict.fromkeys(nets.ROWS, program.fused)
        if program.fused == "each":
            kinds = dict(zip(nets.ROWS, FUSED, strict=True))
        for name, parameter in collection.named_parameters():
            table = name.split(".")[-2]
            if program.fused != "ema" and plan[table] != "data_parallel":
                apply_optimizer_in_backward(FUSED[kinds[table]], [parameter], {"lr": 0.05})
        kernel = "fused" if program.fused == "ema" else None
        sharding = construct_module_sharding_plan(
            module,
            {
                t: generator_of(kind, None if kind == "data_parallel" else kernel)
                for t, kind in plan.items()
            },
            sharder=sharder,
            local_size=layout.ranks_per_node,
            world_size=layout.world_size,
            device_type="cpu",
        )
        net, frozen = nets.Net(program, module), program.change == "frozen"
        if dist.get_rank() > 0:  # which holds other rows, and draws other numbers
            seed_all(seed + 1000 * dist.get_rank())
        return DistributedModelParallel(
            net,
            device=CPU,
            plan=ShardingPlan({"embeddings": sharding}),
            sharders=[sharder],
            data_parallel_wrapper=DefaultDataParallelWrapper(
                static_graph=not frozen, find_unused_parameters=frozen
            ),
        )

    def _at_first(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that are trained from the first turn on."""
        if self.program.change != "added_group":
            return named
        return {name: p for name, p in named.items() if p is not self.net.beside}

    def add_group(self) -> None:
        self.net.beside.grad = None
        self.optimizers.inner.add_param_group({"params": [self.net.beside], "lr": 0.01})

    @property
    def net(self) -> Any:
        return self.model.module

    def batch(self, number: int) -> ZooBatch:
        return self.habit.batch(nets.batch(number, self.program.tables, dist.get_rank()))

    def turn(self, saver: Checkpointer | None) -> None:
        """Train the next batch."""
        self.habit.before(self.place.position)
        loss = LOOPS[self.program.loop](self, self.place.position, saver)
        self.place.position += 1
        self.place.losses.append(loss)
        self.habit.after(self.place.position, saver)
        schedules.step(self.program.schedule, self, self.schedules, loss)

    def tear(self) -> None:
        """Begin a turn, and leave it in its middle, with the tables updated."""
        if self.program.loop not in PIPELINES:
            self.optimizers.zero_grad()
            self.backward(self.place.position)

    def backward(self, number: int, factor: float = 1.0, **options: Any) -> float:
        loss, _ = self.model(self.batch(number))
        (loss * factor).backward(**options)
        return mean_of_ranks(loss)

    def _pipeline(self) -> Any:
        """Return a function that trains the next batch, read ahead from the place in the data."""
        kind, batches = KINDS[self.program.loop], self._batches()
        optimizer: Any = _Outer(self.optimizers)
        pipeline = kind(self.model, optimizer, device=CPU)

        def progress(train: Training) -> float:
            return mean_of_ranks(pipeline.progress(batches).sum())

        return progress

    def _batches(self) -> Iterator[ZooBatch]:
        for number in range(self.place.position, STEPS + 4):
            yield nets.batch(number, self.program.tables, dist.get_rank())


class _Outer:
    """The optimizers as one, for a pipeline."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.zero_grad, self._optimizers = optimizers.zero_grad, optimizers

    def step(self) -> None:
        self._optimizers.step()


def _plain(self: Training, number: int, saver: Checkpointer | None) -> float:
    if self.program.dense == "lbfgs":
        return _by_closure(self, number)
    self.optimizers.zero_grad()
    loss = self.backward(number)
    self.habit.in_the_middle(number, saver)
    self.optimizers.step()
    return loss


def _by_closure(self: Training, number: int) -> float:
    losses: list[float] = []

    def closure() -> float:
        self.optimizers.zero_grad()
        losses.append(self.backward(number))
        return losses[-1]

    self.optimizers.step(closure)
    return losses[-1]


def _late_zero(self: Training, number: int, saver: Checkpointer | None) -> float:
    loss = self.backward(number)
    self.habit.in_the_middle(number, saver)
    self.optimizers.step()
    self.optimizers.zero_grad()
    return loss


def _accumulated(self: Training, number: int, saver: Checkpointer | None) -> float:
    loss = self.backward(number, 0.5)
    self.habit.in_the_middle(number, saver)
    if number % 2 == 1:
        self.optimizers.step()
        self.optimizers.zero_grad()
    return loss


def _dropped(self: Training, number: int, saver: Checkpointer | None) -> float:
    loss = self.backward(number)
    self.habit.in_the_middle(number, saver)
    if not 2 <= number <= 4:
        self.optimizers.step()
    self.optimizers.zero_grad()
    return loss


def _scaled(self: Training, number: int, saver: Checkpointer | None) -> float:
    self.optimizers.zero_grad()
    loss, _ = self.model(self.batch(number))
    self.scaler.scale(loss).backward()
    self.habit.in_the_middle(number, saver)
    if number == 3:
        self.net.last.bias.grad.fill_(torch.inf)
    for optimizer in self.optimizers.outer:
        if optimizer is self.optimizers.fused:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
    self.scaler.update()
    return mean_of_ranks(loss)


def _sam(self: Training, number: int, saver: Checkpointer | None) -> float:
    """Climb, take the gradient there, and step from where the turn began."""
    self.optimizers.zero_grad()
    loss = self.backward(number)
    moves = []
    with torch.no_grad():
        for parameter in (*self.net.first.parameters(), *self.net.last.parameters()):
            move = 0.05 * parameter.grad
            parameter.add_(move)
            moves.append((parameter, move))
    self.optimizers.zero_grad()
    self.backward(number)
    self.habit.in_the_middle(number, saver)
    with torch.no_grad():
        for parameter, move in moves:
            parameter.sub_(move)
    self.optimizers.step()
    return loss


def _twice(self: Training, number: int, saver: Checkpointer | None) -> float:
    """Train two batches a turn."""
    _plain(self, 100 + number, None)
    return _plain(self, number, saver)


def _retained(self: Training, number: int, saver: Checkpointer | None) -> float:
    self.optimizers.zero_grad()
    loss, _ = self.model(self.batch(number))
    loss.backward(retain_graph=True)
    if number % 2:
        loss.backward()
    self.habit.in_the_middle(number, saver)
    self.optimizers.step()
    return mean_of_ranks(loss)


def _piped(self: Training, number: int, saver: Checkpointer | None) -> float:
    assert self.progress is not None
    found: float = self.progress(self)
    return found


LOOPS: dict[str, Any] = {
    "plain": _plain,
    "late_zero": _late_zero,
    "accumulated": _accumulated,
    "dropped": _dropped,
    "scaled": _scaled,
    "sam": _sam,
    "twice": _twice,
    "retained": _retained,
    "pipeline_base": _piped,
    "pipeline_sparse": _piped,
}
