"""The quick start with what teams change in it: wrappers, schedules, metrics, buffers, loops.

A variation is a ``Training`` with a method or two of its own. All are short, and each is one that
resumed otherwise than it had been killed, or could have.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.programs.batches import Clicks
from tests.programs.live import kernels
from tests.programs.quickstart import DIM, RATE, ROWS, Net, Reader
from tests.programs.session import INTERVAL, STEPS, AfterStep, Ended
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, PerRank

STAGES = [WarmupStage(WarmupPolicy.LINEAR, 6, 0.1), WarmupStage(WarmupPolicy.POLY, 40, 1.0)]
Parameters = list[torch.Tensor]


class Training:
    """The quick start's loop, in parts that a variation may replace.

    Attributes:
        schedules: stepped at the end of each turn.
        state: what is given to the Checkpointer besides the optimizer and the reader.
        options: how else the Checkpointer is made.
    """

    net: type[nn.Module] = Net
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        net = self.net()
        self.apply(net)
        self.model = DistributedModelParallel(net, device=torch.device("cpu"))
        self.fused: KeyedOptimizer = self.model.fused_optimizer
        self.dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())), self.factory
        )
        self.inner: Optimizer = self.dense._optimizer
        self.optimizer = self.wrapped()
        self.schedules: list[Any] = []
        self.state: dict[str, Any] = {}
        self.prepare()

    def apply(self, net: Any) -> None:
        """Give the tables their optimizer."""
        apply_optimizer_in_backward(RowWiseAdagrad, net.ebc.parameters(), {"lr": RATE})

    def factory(self, parameters: Parameters) -> Optimizer:
        """Make torch's optimizer of the dense parameters."""
        return torch.optim.Adam(parameters, lr=RATE)

    def wrapped(self) -> KeyedOptimizer:
        """Put the optimizers together."""
        return CombinedOptimizer([("tables", self.fused), ("dense", self.dense)])

    def prepare(self) -> None:
        """Make what else the loop needs."""

    def turn(self, number: int, batch: Batch) -> None:
        """Train a batch, the first of which has number 1."""
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()
        self.after(number, batch)
        for schedule in self.schedules:
            schedule.step()

    def after(self, number: int, batch: Batch) -> None:
        """Do something once the optimizer has stepped."""

    def schedule(self, *schedules: LRScheduler) -> None:
        self.schedules = list(schedules)
        self.state |= {f"schedule{index}": s for index, s in enumerate(schedules)}


class WarmUpAroundAll(Training):
    def wrapped(self) -> KeyedOptimizer:
        return WarmupOptimizer(super().wrapped(), list(STAGES), lr=RATE)


class WarmUpAndClippingInside(Training):
    """As TorchRec's users nest them: each part warms up on its own, the dense one is clipped."""

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
    """The norm is kept, of gradients that include none of the sharded tables'."""

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
    """Schedules on the optimizers inside, which the wrappers around them don't know."""

    def prepare(self) -> None:
        self.schedule(StepLR(self.inner, 3, 0.5), LambdaLR(self.fused, lambda n: 1 / (1 + n)))


class ScheduleOfAll(Training):
    def prepare(self) -> None:
        self.schedule(LambdaLR(self.optimizer, lambda n: 0.8**n))


class OneCycle(Training):
    """Sets momentum as well as rates."""

    def prepare(self) -> None:
        self.schedule(OneCycleLR(self.inner, 0.05, total_steps=STEPS + 5))


class OneAfterTheOther(Training):
    def prepare(self) -> None:
        both = [LinearLR(self.inner, 0.1, total_iters=4), CosineAnnealingLR(self.inner, 20)]
        self.schedule(SequentialLR(self.inner, both, milestones=[4]))


class Cyclic(Training):
    """Keeps a function of its own in the state, and moves rate and momentum up and down."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True)

    def prepare(self) -> None:
        self.schedule(CyclicLR(self.inner, 0.01, 0.05, step_size_up=3, mode="exp_range", gamma=0.9))


class Plateau(Training):
    """Halves the rate when the loss has not fallen for a while."""

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
    """Two groups; rates, decay and momentum are set in the loop, once."""

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
    """Torch's fused kernel keeps its step counters as it likes."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, fused=True, amsgrad=True)


class Apart(Training):
    """Optimizers are given to the Checkpointer one by one, the dense one without its wrapper."""

    def prepare(self) -> None:
        self.schedule(StepLR(self.dense, 3, 0.5), LambdaLR(self.fused, lambda n: 1 / (1 + n)))
        self.state |= {"optimizer": self.fused, "dense": self.inner}


class Nadam(Training):
    """Keeps more than moments."""

    def factory(self, parameters: Parameters) -> Optimizer:
        return torch.optim.NAdam(parameters, lr=RATE, momentum_decay=0.01)


class KernelsOwnRate(Training):
    """No fused optimizer in sight: the tables' rate is set on their kernel."""

    def wrapped(self) -> KeyedOptimizer:
        return self.dense

    def after(self, number: int, batch: Batch) -> None:
        if number == 4:
            for _, kernel in kernels(self.model):
                if hasattr(kernel, "set_learning_rate"):
                    kernel.set_learning_rate(0.003)


class KernelsHyperparameters(Training):
    """Set through the fused optimizer while it trains."""

    def after(self, number: int, batch: Batch) -> None:
        if number == 4:
            self.optimizer.update_hyper_parameters({"eps": 0.01, "weight_decay": 0.02})


class TwoKernels(Training):
    """Each table has an optimizer of its own kind, and a schedule of its own."""

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
    """Gradients are zeroed, which gives kernels their rate, before the schedule sets the next."""

    def prepare(self) -> None:
        self.schedule(LambdaLR(self.optimizer, lambda n: 0.7**n))

    def turn(self, number: int, batch: Batch) -> None:
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for schedule in self.schedules:
            schedule.step()


class Accumulated(Training):
    """The dense optimizer steps every other batch."""

    def turn(self, number: int, batch: Batch) -> None:
        (self.model(batch) / 2).backward()
        if number % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Dropped(Training):
    """Gradients of many batches in a row are dropped, as after a NaN, and checkpoints go on."""

    def turn(self, number: int, batch: Batch) -> None:
        self.model(batch).backward()
        if not 5 <= number <= 14:
            self.optimizer.step()
        self.optimizer.zero_grad()


class Scaled(Training):
    """Losses are scaled; the scaler skips the dense optimizer's step where a gradient overflows."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.state["scaler"] = self.scaler

    def turn(self, number: int, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch)).backward()
        if number == 7:
            self.model.module.over[0].bias.grad.fill_(torch.inf)
        self.scaler.step(self.inner)
        self.scaler.update()


class Evaluated(Training):
    """Looks rows up without training them in between: kernels count that."""

    def after(self, number: int, batch: Batch) -> None:
        if number % 2 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(batch)
            self.model.train()


class NormalisedNet(Net):
    """The same, with the dense features normalised over each rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.over.insert(0, nn.BatchNorm1d(3 + DIM * len(ROWS)))


class Normalised(Training):
    """Running statistics are each rank's own, and declared so."""

    net = NormalisedNet
    options: ClassVar[dict[str, Any]] = {"per_rank_buffers": ["*.running_*"]}


class Scores:
    """A metric that keeps all that it has seen, each rank its own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0)

    def update(self, scores: torch.Tensor) -> None:
        self.seen = torch.cat([self.seen, scores])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class GrowingMetric(Training):
    def prepare(self) -> None:
        self.scores = Scores()
        self.state["scores"] = PerRank(self.scores)

    def after(self, number: int, batch: Batch) -> None:
        self.scores.update(batch.labels.float() * number)


class Replay:
    """The last few batches' dense features by their number, and which to train once more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: dict[str, torch.Tensor] = {}
        self.draw = torch.Generator().manual_seed(1)

    def add(self, number: int, value: torch.Tensor) -> None:
        self.kept[str(number)] = value
        if len(self.kept) > self.size:
            del self.kept[next(iter(self.kept))]

    def sample(self) -> torch.Tensor:
        index = int(torch.randint(len(self.kept), (), generator=self.draw))
        return list(self.kept.values())[index]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state["kept"])
        self.draw.set_state(state["draw"])


class ReplayBuffer(Training):
    """Keys come and go, and their order counts."""

    def prepare(self) -> None:
        self.replay = Replay(4)
        self.state["replay"] = PerRank(self.replay)

    def turn(self, number: int, batch: Batch) -> None:
        if number > 1:
            batch.dense_features = batch.dense_features + self.replay.sample()
        super().turn(number, batch)
        self.replay.add(number, batch.dense_features / 2)


class Averaged(Training):
    """A running average of the dense layers."""

    def prepare(self) -> None:
        self.average = AveragedModel(self.model.module.over)
        self.state["average"] = self.average

    def after(self, number: int, batch: Batch) -> None:
        self.average.update_parameters(self.model.module.over)


VARIATIONS: dict[str, type[Training]] = {
    kind.__name__: kind for kind in [*Training.__subclasses__(), GroupsInTheStateDict]
}


def main(root: str, after_step: AfterStep, variation: str) -> Ended:
    torch.manual_seed(5)
    training = VARIATIONS[variation]()
    reader = Reader(Clicks(ROWS, dist.get_rank(), STEPS))
    reports: list[CheckpointReport] = []
    checkpointer = Checkpointer(
        root,
        model=training.model,
        state={"optimizer": training.optimizer, "reader": reader, **training.state},
        policy=Consecutive(),
        every_steps=INTERVAL,
        when_busy="wait",
        callbacks=[reports.append],
        **training.options,
    )
    checkpointer.restore()
    resumed_from = checkpointer.steps
    for batch in reader:
        training.turn(reader.position, batch)
        checkpointer.step()
        after_step(checkpointer.steps)
    checkpointer.close()
    return Ended({"model": training.model, "training": training}, reports, resumed_from)
