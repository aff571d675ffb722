"""Do what a drawn program's loop does beside training: evaluate, swap, freeze, write rows."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel

from tests.distributed.zoo import ZooBatch
from tests.unit.drawn_programs.programs import Program
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveDeferred

CHANGED = 4
"""The turn before which the optimizers are changed."""
WRITTEN = (2, 5)
"""The turns after which rows are written by hand."""


class Shadow:
    """A team's own average of the dense weights, swapped in for evaluations."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in _dense(model).items():
            old = self.average.get(name, parameter.detach())
            self.average[name] = old.lerp(parameter.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state)


class Metric:
    """A metric that keeps all samples, in a list of tensors that grows, and a table of counts."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.counts: dict[int, int] = {}

    def update(self, batch: ZooBatch) -> None:
        self.seen.append(batch.dense.sum(1))
        for value in batch.features.values().tolist():
            self.counts[value] = self.counts.get(value, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.counts = list(state["seen"]), dict(state["counts"])


class Replay:
    """The last few batches' dense features, and a generator that draws of these."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.draw = torch.Generator().manual_seed(1)

    def add(self, number: int, value: torch.Tensor) -> None:
        self.kept[str(number)] = value
        if len(self.kept) > 3:
            del self.kept[next(iter(self.kept))]

    def sample(self) -> torch.Tensor | float:
        if not self.kept:
            return 0.0
        return list(self.kept.values())[int(torch.randint(len(self.kept), (), generator=self.draw))]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state["kept"])
        self.draw.set_state(state["draw"])


def _dense(model: Any) -> dict[str, torch.nn.Parameter]:
    net = model.module
    return {
        f"{part}.{name}": parameter
        for part in ("first", "last")
        for name, parameter in getattr(net, part).named_parameters()
    }


class Habit:
    """The habits of a program's loop beside training.

    Attributes:
        kept: the state object of what it does, if that has one.
    """

    def __init__(self, program: Program, training: Any) -> None:
        self.program = program
        self.training = training
        self.kept: Any = None
        kinds: dict[str, Any] = {"swapped": Shadow, "swapped_after": Shadow}
        kinds |= {"metric": Metric, "replay": Replay}
        if program.between in kinds:
            self.kept = kinds[program.between]()
        if program.between == "averaged":
            self.kept = AveragedModel(training.net.first, use_buffers=True)
        if self.kept is not None:
            training.state["kept"] = self.kept

    def batch(self, batch: ZooBatch) -> ZooBatch:
        """Return a batch as the loop trains it."""
        if self.program.between == "noise":
            noise = torch.from_numpy(np.random.rand(*batch.dense.shape)).float()
            return replace(batch, dense=batch.dense + noise * random.random() + torch.rand(()))
        if self.program.between == "replay":
            return replace(batch, dense=batch.dense + 0.1 * self.kept.sample())
        return batch

    def before(self, number: int) -> None:
        """Change what is trained, before a turn."""
        training, change = self.training, self.program.change
        if change == "frozen":
            for parameter in training.net.first.parameters():
                parameter.requires_grad_(not 2 <= number < 5)
        if change == "clamped":
            for parameter in training.net.last.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        if number != CHANGED:
            return
        inner = training.optimizers.inner
        if change == "added_group":
            training.add_group()
        elif change == "reset":
            inner.state.clear()
        elif change == "reloaded":
            for optimizer in training.optimizers.outer[1:] or training.optimizers.outer:
                optimizer.load_state_dict(optimizer.state_dict())
        elif change == "rewound":
            with torch.no_grad():
                for parameter in training.net.last.parameters():
                    parameter.mul_(0.5)

    def in_the_middle(self, number: int, saver: Checkpointer | None) -> None:
        """Save between backward and the optimizer's step, as by mistake."""
        if saver is not None and self.program.saves == "in_the_middle" and number % 3 == 2:
            with suppress(SaveDeferred):
                saver.save()

    def after(self, number: int, saver: Checkpointer | None) -> None:
        """Act at the end of a turn, before the Checkpointer's step; the first turn has number 1."""
        model, between = self.training.model, self.program.between
        if between == "averaged":
            self.kept.update_parameters(self.training.net.first)
        elif between in ("swapped", "swapped_after"):
            self.kept.update(model)
        elif between == "metric":
            self.kept.update(self.training.batch(number))
        elif between == "replay":
            self.kept.add(number, self.training.batch(number).dense.detach() / 2)
        if number % 2 == 0 and between in ("evaluated", "evaluated_with_grad"):
            self._evaluate(number, grad=between == "evaluated_with_grad")
        if number % 2 == 0 and between == "swapped":
            self._swap(number)
        if number in WRITTEN and self.program.by_hand != "none":
            self._write(number, saver)

    def after_step(self, number: int) -> None:
        """Act after the Checkpointer's step."""
        if self.program.between == "swapped_after" and number % 2 == 0:
            self._swap(number)

    def _evaluate(self, number: int, grad: bool) -> None:
        model = self.training.model
        model.eval()
        with torch.set_grad_enabled(grad):
            model(self.training.batch(number + 50))
        model.train()

    def _swap(self, number: int) -> None:
        """Evaluate averaged weights in the place of the trained ones."""
        own = {name: p.detach().clone() for name, p in _dense(self.training.model).items()}
        for values in (self.kept.average, own):
            with torch.no_grad():
                for name, parameter in _dense(self.training.model).items():
                    parameter.copy_(values[name])
            if values is not own:
                self._evaluate(number, grad=False)

    def _write(self, number: int, saver: Checkpointer | None) -> None:
        kind, model = self.program.by_hand, self.training.model
        rows = [1, 3 + number, 30 + number]
        if kind == "loaded":
            model.load_state_dict(model.state_dict())
            return
        for name, value in model.state_dict().items():
            if not name.endswith("t0.weight"):
                continue
            table = name.removesuffix(".weight")
            shards = [(s.metadata.shard_offsets[0], s.tensor) for s in value.local_shards()]
            if kind == "writing" and saver is not None:
                with saver.writing(table, rows):
                    _fill(shards, rows, number)
            elif kind == "marked":
                if saver is not None:
                    saver.mark(table, rows)
                _fill([(first, shard.data) for first, shard in shards], rows, number)
            else:
                _fill(shards, rows, number)


@torch.no_grad()
def _fill(shards: list[tuple[int, torch.Tensor]], rows: list[int], number: int) -> None:
    for first, shard in shards:
        own = [row - first for row in rows if 0 <= row - first < len(shard)]
        if own:
            shard[own] = number / 10


def made(program: Program, training: Any) -> Habit:
    """Return the habit of a program."""
    return Habit(program, training)
