"""Drop the protection of what training overwrites while a checkpoint still needs it.

Each function breaks one thing, in the demo's trainer or in a random sequence. The background is
held back until training has taken a step: however fast it is, it never comes first.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchrec_checknrun.marks.row_copies import KernelCopies, ShardCopies
from torchrec_checknrun.run import saver
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.snapshot import late_copies, staging
from torchrec_checknrun.snapshot.late_copies import LateCopies

Put = Callable[[Any, str, Any], object]
"""Puts a function in another's place: owner, name, function."""
Tell = Callable[[str], object]
"""Is told that the sabotage takes place."""
PATIENCE = 30.0
"""Seconds until a run that hangs says so."""


class Training:
    """Training as the background sees it: its steps, and whether it waits for the checkpoint."""

    def __init__(self, put: Put) -> None:
        self._changed = threading.Condition()
        self._steps = self._waiting = self._at_cut = 0
        self.parameters: set[int] = set()
        """Addresses of all parameters that an optimizer has stepped."""
        await_save, begin = saver.await_save, LateCopies.begin

        def begin_and_see(copies: LateCopies) -> None:
            with self._changed:
                self._at_cut = self._steps
            begin(copies)

        def await_and_say_so(save: Save) -> None:
            self._count(waiting=1)
            try:
                await_save(save)
            finally:
                self._count(waiting=-1)

        put(LateCopies, "begin", begin_and_see)
        put(saver, "await_save", await_and_say_so)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def wait_for_step(self) -> None:
        """Wait until training has taken a step since the cut; not if training waits itself."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while self._steps == self._at_cut and not self._waiting:
                assert time.monotonic() < deadline, "training takes no step"
                self._changed.wait(0.1)

    def _count(self, steps: int = 0, waiting: int = 0) -> None:
        with self._changed:
            self._steps += steps
            self._waiting += waiting
            self._changed.notify_all()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self.parameters.update(each.data_ptr() for each in _dense_parameters(optimizer))

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._count(steps=bool(_dense_parameters(optimizer)))  # which come last


def _dense_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters but those of fused tables, which are sharded tensors."""
    every = (each for group in optimizer.param_groups for each in group["params"])
    return [each for each in every if isinstance(each, torch.nn.Parameter)]


def hold_back(put: Put) -> Training:
    """Copy rows behind training only after its next step, and all of the dense part late:
    harmless by itself.
    """
    training, stage, make = Training(put), ShardCopies.stage, LateCopies.make

    def wait_and_stage(copies: ShardCopies, *arguments: Any) -> None:
        training.wait_for_step()
        stage(copies, *arguments)

    def wait_and_make(copies: LateCopies) -> None:
        if in_background():
            training.wait_for_step()
        make(copies)

    put(ShardCopies, "stage", wait_and_stage)
    put(LateCopies, "make", wait_and_make)
    for module in (late_copies, staging):
        put(module, "LEAST_BYTES", 1)
    return training


def in_background() -> bool:
    """Tell whether this is not the training thread."""
    return threading.current_thread() is not threading.main_thread()


def nothing(put: Put, tell: Tell) -> None:
    """Protect no row at all."""
    hold_back(put)

    def protect_none(*_: object) -> None:
        tell("rows are not protected")

    put(KernelCopies, "before_update", protect_none)


def one_table(put: Put, tell: Tell) -> None:
    """Protect all tables of a kernel but the first."""
    hold_back(put)
    protect = KernelCopies.before_update

    def protect_others(copies: Any, values: Any, offsets: list[int], tables: list[int]) -> None:
        protect(copies, values, offsets, [table or -1 for table in tables])
        tell("the first table of a kernel is not protected")

    put(KernelCopies, "before_update", protect_others)


def one_state(put: Put, tell: Tell) -> None:
    """Take one optimizer state of one table from live rows; all else is that of the cut."""
    hold_back(put)
    stage = ShardCopies.stage

    def stage_live(copies: ShardCopies, rows: Any, start: int, memory: Any, at: list[int]) -> None:
        stage(copies, rows, start, memory, at)
        if copies._place == 0 and len(copies._tensors) > 1:
            live = copies._tensors[1][rows].contiguous().view(-1).view(torch.uint8)
            memory[at[2] : at[2] + live.numel()] = live
            tell("an optimizer state of one table is not protected")

    put(ShardCopies, "stage", stage_live)


def second_feature(put: Put, tell: Tell) -> None:
    """Protect the rows of a shared table's first feature only."""
    hold_back(put)
    protect = KernelCopies.before_update

    def protect_first(copies: Any, values: Any, offsets: list[int], tables: list[int]) -> None:
        first = [-1 if table in tables[:i] else table for i, table in enumerate(tables)]
        protect(copies, values, offsets, first)
        if first != tables:
            tell("the second feature of a table is not protected")

    put(KernelCopies, "before_update", protect_first)


def dense_parameters(put: Put, tell: Tell) -> None:
    """Let steps overwrite dense parameters; their optimizers' states are those of the cut."""
    _dense(put, lambda: tell("dense parameters are not protected"), parameters=True)


def dense_states(put: Put, tell: Tell) -> None:
    """Let steps overwrite the states of dense optimizers; parameters are those of the cut."""
    _dense(put, lambda: tell("dense optimizers' states are not protected"), parameters=False)


def _dense(put: Put, tell: Callable[[], object], parameters: bool) -> None:
    """Copy some of the dense part after a step of training, whatever version counters say."""
    make, training, lock = LateCopies.make, hold_back(put), threading.Lock()
    victims: weakref.WeakKeyDictionary[LateCopies, list[Any]] = weakref.WeakKeyDictionary()

    def make_others(copies: LateCopies) -> None:
        if in_background():
            training.wait_for_step()
        with lock:
            left, found = copies._left, victims.setdefault(copies, [])
            chosen = [
                (each.tensor.data_ptr() in training.parameters) == parameters for each in left
            ]
            found += [each for each, is_victim in zip(left, chosen, strict=True) if is_victim]
            left[:] = [each for each, is_victim in zip(left, chosen, strict=True) if not is_victim]
            make(copies)
            if in_background():
                for each in found:
                    each.target.copy_(each.source)
                    tell()

    put(LateCopies, "make", make_others)
