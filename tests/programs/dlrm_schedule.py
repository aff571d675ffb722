"""Train a DLRM with a learning-rate schedule of its own, a pipeline and evaluation.

Modelled on the DLRM that Meta has published: tables with Adagrad in the backward pass, dense layers
with Adagrad, both in a CombinedOptimizer, whose rates a scheduler of the program sets each step;
evaluation within the epoch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.programs.batches import Clicks
from tests.programs.session import INTERVAL, STEPS, AfterStep, Ended, run
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive

ROWS = {"ad": 300, "user": 500, "site": 40}
RATE, DIM, EVALUATE_EVERY = 0.1, 8, 5


class RiseHoldFall(LRScheduler):
    """A schedule that raises all rates to their base, holds them, and lowers them quadratically."""

    def __init__(self, optimizer: Optimizer, rise: int, fall_from: int, fall: int) -> None:
        self.rise, self.fall_from, self.fall = rise, fall_from, fall
        self.held: list[Any] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        now = self._step_count
        if now < self.rise:
            self.held = [base * now / self.rise for base in self.base_lrs]
        elif self.fall_from <= now < self.fall_from + self.fall:
            left = 1 - (now - self.fall_from) / self.fall
            self.held = [max(1e-7, base * left**2) for base in self.base_lrs]
        return list(self.held)


def main(root: str, after_step: AfterStep) -> Ended:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in ROWS.items()
    ]
    dlrm = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=3,
            dense_arch_layer_sizes=[16, DIM],
            over_arch_layer_sizes=[16, 1],
            dense_device=device,
        )
    )
    apply_optimizer_in_backward(
        torch.optim.Adagrad, dlrm.model.sparse_arch.parameters(), {"lr": RATE}
    )
    model = DistributedModelParallel(dlrm, device=device)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=RATE),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    schedule = RiseHoldFall(optimizer, rise=5, fall_from=8, fall=20)

    reports: list[CheckpointReport] = []
    checkpointer = Checkpointer(
        root,
        model=model,
        state={"optimizer": optimizer, "schedule": schedule},
        policy=Consecutive(),
        every_steps=INTERVAL,
        when_busy="wait",
        callbacks=[reports.append],
    )
    checkpointer.restore()
    resumed_from = checkpointer.steps

    train = TrainPipelineSparseDist(model, optimizer, device)
    data = Clicks(ROWS, dist.get_rank(), STEPS, first=resumed_from)
    batches = iter(DataLoader(data, batch_size=None))
    accuracy = 0.0
    while True:
        try:
            train.progress(batches)
        except StopIteration:
            break
        schedule.step()
        checkpointer.step()
        after_step(checkpointer.steps)
        if checkpointer.steps % EVALUATE_EVERY == 0:
            accuracy = evaluate(model, train)
    checkpointer.close()
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "accuracy": accuracy}
    return Ended(objects, reports, resumed_from)


def evaluate(model: DistributedModelParallel, train: TrainPipelineSparseDist) -> float:
    """Return the part of held-out samples that are predicted right, on all ranks."""
    train.detach()
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for batch in Clicks(ROWS, 500 + dist.get_rank(), 2):
            _, (_, logits, labels) = model(batch)
            right += torch.tensor([((logits > 0) == labels).sum(), len(labels)])
    dist.all_reduce(right)
    model.train()
    train.attach()
    return float(right[0] / right[1])


if __name__ == "__main__":
    run(main)
