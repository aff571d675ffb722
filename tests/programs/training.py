"""Split the quick start's training into parts, so that variations can replace one or two."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LRScheduler,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.programs.quickstart import RATE, Net

Parameters = list[torch.Tensor]


class Training:
    """The quick start's loop, in parts that a variation may replace.

    Attributes:
        schedules: stepped at the end of each turn.
        state: given to the Checkpointer besides the optimizer and the reader.
        options: other arguments of the Checkpointer.
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
        """Combine the optimizers."""
        return CombinedOptimizer([("tables", self.fused), ("dense", self.dense)])

    def prepare(self) -> None:
        """Make everything else that the loop needs."""

    def turn(self, number: int, batch: Batch) -> None:
        """Train a batch, the first of which has number 1."""
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()
        self.after(number, batch)
        for schedule in self.schedules:
            schedule.step()

    def after(self, number: int, batch: Batch) -> None:
        """Act after the optimizer has stepped."""

    def schedule(self, *schedules: LRScheduler) -> None:
        self.schedules = list(schedules)
        self.state |= {f"schedule{index}": s for index, s in enumerate(schedules)}
