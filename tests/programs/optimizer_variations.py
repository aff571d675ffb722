"""Vary the quick start's optimizers as teams do: wrappers, schedules, groups, kernels' rates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torchrec.datasets.utils import Batch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    OptimizerWrapper,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.programs.live import kernels
from tests.programs.quickstart import RATE
from tests.programs.session import STEPS
from tests.programs.training import Parameters, Training

STAGES = [WarmupStage(WarmupPolicy.LINEAR, 6, 0.1), WarmupStage(WarmupPolicy.POLY, 40, 1.0)]


class WarmUpAroundAll(Training):
    def wrapped(self) -> KeyedOptimizer:
        return WarmupOptimizer(super().wrapped(), list(STAGES), lr=RATE)


class WarmUpAndClippingInside(Training):
    """Optimizers nested as by TorchRec's users: each part warms up alone; one is clipped."""

    def wrapped(self) -> KeyedOptimizer:
        clipped = GradientClippingOptimizer(self.dense, GradientClipping.NORM, 0.05)
        return CombinedOptimizer(
            [
                ("tables", WarmupOptimizer(self.fused, list(STAGES), lr=RATE)),
                ("dense", WarmupOptimizer(clipped, list(STAGES), lr=RATE / 2)),
            ]
        )


class ClippingAroundWarmUp(Training):
    def wrapped(self) -> KeyedOptimizer:
        warm = WarmupOptimizer(self.dense, list(STAGES), lr=RATE)
        clipped = GradientClippingOptimizer(
            warm, GradientClipping.VALUE, 0.01, track_grad_norm=True
        )
        return CombinedOptimizer([("tables", self.fused), ("dense", clipped)])


class ClippingAroundAll(Training):
    """A clipping wrapper that keeps the norm of gradients, which include no sharded table's."""

    def wrapped(self) -> KeyedOptimizer:
        return GradientClippingOptimizer(super().wrapped(), GradientClipping.NORM, 0.02)


class Easing(OptimizerWrapper):
    """A team's own wrapper: the fewer steps it has counted, the smaller it makes gradients."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__(optimizer)
        self.eased = 0
        self.history: list[float] = []
        self.mean = torch.zeros(2)

    def step(self, closure: Any = None) -> None:
        self.eased += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 - 0.9**self.eased - 0.1 * float(self.mean[0]))
                    self.history.append(float(parameter.grad.sum()))
        self.mean += torch.tensor([0.01, 1.0])
        super().step(closure)


class OwnWrapper(Training):
    def wrapped(self) -> KeyedOptimizer:
        return CombinedOptimizer([("tables", self.fused), ("dense", Easing(self.dense))])


class ScheduleOfEach(Training):
    """Schedules on the inner optimizers, unknown to the wrappers around them."""

    def prepare(self) -> None:
        self.schedule(StepLR(self.inner, 3, 0.5), LambdaLR(self.fused, lambda n: 1 / (1 + n)))


class ScheduleOfAll(Training):
    def prepare(self) -> None:
        self.schedule(LambdaLR(self.optimizer, lambda n: 0.8**n))


class OneCycle(Training):
    """A schedule that sets momentum as well as rates."""

    def prepare(self) -> None:
        self.schedule(OneCycleLR(self.inner, 0.05, total_steps=STEPS + 5))


class OneAfterTheOther(Training):
    def prepare(self) -> None:
        both = [LinearLR(self.inner, 0.1, total_iters=4), CosineAnnealingLR(self.inner, 20)]
        self.schedule(SequentialLR(self.inner, both, milestones=[4]))


class Cyclic(Training):
    """A schedule with a function in its state that moves rate and momentum up and down."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True)

    def prepare(self) -> None:
        self.schedule(CyclicLR(self.inner, 0.01, 0.05, step_size_up=3, mode="exp_range", gamma=0.9))


class Plateau(Training):
    """A schedule that halves the rate when the loss has not fallen for a while."""

    def prepare(self) -> None:
        self.plateau = ReduceLROnPlateau(self.inner, factor=0.5, patience=1)
        self.state["plateau"] = self.plateau

    def turn(self, number: int, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.plateau.step(float(total))


class GroupsByHand(Training):
    """Two groups; the loop sets rates, decay and momentum once."""

    def factory(self, parameters: Parameters) -> Optimizer:
        biases = [p for p in parameters if p.dim() == 1]
        others = [p for p in parameters if p.dim() > 1]
        groups: list[dict[str, Any]] = [
            {"params": others},
            {"params": biases, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups)

    def after(self, number: int, batch: Batch) -> None:
        if number == 4:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.003
        if number == 5:
            self.inner.param_groups[0]["weight_decay"] = 0.3
            self.inner.param_groups[1]["betas"] = (0.8, 0.9)


class GroupsInTheStateDict(GroupsByHand):
    """TorchRec's option that puts groups into state dicts."""

    def prepare(self) -> None:
        self.optimizer.save_param_groups(True)


class RateIsATensor(Training):
    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(RATE), foreach=False)

    def prepare(self) -> None:
        self.schedule(StepLR(self.inner, 2, 0.7))


class FusedAdam(Training):
    """Torch's fused kernel, which keeps its step counters in its own way."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, fused=True, amsgrad=True)


class Apart(Training):
    """Optimizers given to the Checkpointer one by one, the dense one without its wrapper."""

    def prepare(self) -> None:
        self.schedule(StepLR(self.dense, 3, 0.5), LambdaLR(self.fused, lambda n: 1 / (1 + n)))
        self.state |= {"optimizer": self.fused, "dense": self.inner}


class Nadam(Training):
    """An optimizer that keeps more than moments."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.NAdam(parameters, lr=RATE, momentum_decay=0.01)


class KernelsOwnRate(Training):
    """A rate set on the tables' kernel, without any fused optimizer at hand."""

    def wrapped(self) -> KeyedOptimizer:
        return self.dense

    def after(self, number: int, batch: Batch) -> None:
        if number == 4:
            for _, kernel in kernels(self.model):
                if hasattr(kernel, "set_learning_rate"):
                    kernel.set_learning_rate(0.003)


class KernelsHyperparameters(Training):
    """Hyperparameters set through the fused optimizer during training."""

    def after(self, number: int, batch: Batch) -> None:
        if number == 4:
            self.optimizer.update_hyper_parameters({"eps": 0.01, "weight_decay": 0.02})


class TwoKernels(Training):
    """Tables with an optimizer of its own kind each, and a schedule of its own."""

    def apply(self, net: Any) -> None:
        bags = net.ebc.embedding_bags
        for name, kind in (("product", RowWiseAdagrad), ("user", torch.optim.Adagrad)):
            table = bags[f"{name}_table"]
            apply_optimizer_in_backward(kind, table.parameters(), {"lr": RATE})
        apply_optimizer_in_backward(
            torch.optim.SGD, bags["store_table"].parameters(), {"lr": RATE / 2}
        )

    def prepare(self) -> None:
        powers = [0.9, 0.8, 0.7, 0.6][: len(self.fused.param_groups)]
        self.schedule(LambdaLR(self.fused, [partial(pow, power) for power in powers]))


class KernelsLag(Training):
    """A loop that zeroes gradients, which sets kernels' rates, before the schedule's next step."""

    def prepare(self) -> None:
        self.schedule(LambdaLR(self.optimizer, lambda n: 0.7**n))

    def turn(self, number: int, batch: Batch) -> None:
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()
