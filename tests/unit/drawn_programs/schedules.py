"""Make what moves a drawn program's rates."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR

from tests.programs.live import kernels
from tests.unit.drawn_programs.optimizers import Optimizers


def made(name: str, optimizers: Optimizers) -> list[Any]:
    """Return the schedules of a name."""
    inner, last = optimizers.inner, optimizers.outer[-1]
    cycles = "betas" in inner.defaults or "momentum" in inner.defaults
    makes: dict[str, Any] = {
        "lambda": lambda: [LambdaLR(inner, lambda n: 1 / (1 + n))],
        "lambda_of_all": lambda: [LambdaLR(last, lambda n: 0.8**n)],
        "lambda_of_tables": lambda: [LambdaLR(optimizers.fused, lambda n: 0.7**n)],
        "one_cycle": lambda: [OneCycleLR(inner, 0.05, total_steps=20, cycle_momentum=cycles)],
        "sequential": lambda: [
            SequentialLR(
                inner,
                [LinearLR(inner, 0.1, total_iters=3), CosineAnnealingLR(inner, 9)],
                milestones=[3],
            )
        ],
        "cyclic": lambda: [
            CyclicLR(inner, 0.01, 0.05, step_size_up=3, mode="exp_range", cycle_momentum=cycles)
        ],
        "averaging_rate": lambda: [SWALR(inner, swa_lr=0.002, anneal_epochs=4)],
        "chained": lambda: [
            ChainedScheduler([LinearLR(inner, 0.2, total_iters=4), ExponentialLR(inner, 0.9)])
        ],
        "multiplied": lambda: [MultiplicativeLR(inner, lambda n: 0.9 + 0.01 * n)],
        "plateau": lambda: [ReduceLROnPlateau(inner, factor=0.5, patience=1)],
        "cosine_restarts": lambda: [CosineAnnealingWarmRestarts(inner, 3)],
    }
    found: list[Any] = makes[name]() if name in makes else []
    return found


def step(name: str, training: Any, schedules: list[Any], loss: float) -> None:
    """Move the rates at the end of a turn."""
    number = training.place.position
    for schedule in schedules:
        if name == "plateau":
            schedule.step(loss)
        else:
            schedule.step()
    if number != 4:
        return
    if name == "by_hand":
        for optimizer in training.optimizers.outer:
            for group in optimizer.param_groups:
                if isinstance(group.get("lr"), torch.Tensor):
                    group["lr"].fill_(0.011)
                else:
                    group["lr"] = 0.011
        training.optimizers.inner.param_groups[0]["weight_decay"] = 0.2
    elif name == "on_kernel":
        for _, kernel in kernels(training.model):
            if hasattr(kernel, "set_learning_rate"):
                kernel.set_learning_rate(0.003)
    elif name == "hyperparameters":
        training.optimizers.fused.update_hyper_parameters({"eps": 0.01, "weight_decay": 0.02})
