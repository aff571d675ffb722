"""Train TorchRec's quick start: an EmbeddingBagCollection, DistributedModelParallel, a plain loop.

The tables are trained in the backward pass, the rest by Adam over the named parameters, both behind
one CombinedOptimizer, and the reader is a state object that knows its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.programs.batches import Clicks
from tests.programs.session import INTERVAL, STEPS, AfterStep, Ended, run
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive

ROWS = {"product": 2000, "user": 1500, "store": 20}
DIM, RATE = 8, 0.02


class Net(nn.Module):
    """A net of pooled embeddings beside dense features, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{name}_table", embedding_dim=DIM, num_embeddings=rows, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(3 + DIM * len(ROWS), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled = self.ebc(batch.sparse_features).values()
        logits = self.over(torch.cat([batch.dense_features, pooled], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())


@dataclass
class Reader:
    """A stream of batches that knows how many it has given."""

    data: Clicks
    position: int = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Batch:
        if self.position == STEPS:
            raise StopIteration
        self.position += 1
        return self.data.batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def main(root: str, after_step: AfterStep) -> Ended:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = Net()
    apply_optimizer_in_backward(RowWiseAdagrad, net.ebc.parameters(), {"lr": RATE})
    model = DistributedModelParallel(net, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(model.named_parameters()),
        lambda parameters: torch.optim.Adam(parameters, lr=RATE),
    )
    optimizer = CombinedOptimizer([("tables", model.fused_optimizer), ("dense", dense)])
    reader = Reader(Clicks(ROWS, dist.get_rank(), STEPS))

    reports: list[CheckpointReport] = []
    checkpointer = Checkpointer(
        root,
        model=model,
        state={"optimizer": optimizer, "reader": reader},
        policy=Consecutive(),
        every_steps=INTERVAL,
        when_busy="wait",
        callbacks=[reports.append],
    )
    checkpointer.restore()
    resumed_from = checkpointer.steps
    for batch in reader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        checkpointer.step()
        after_step(checkpointer.steps)
    checkpointer.close()
    objects = {"model": model, "optimizer": optimizer, "reader": reader}
    return Ended(objects, reports, resumed_from)


if __name__ == "__main__":
    run(main)
