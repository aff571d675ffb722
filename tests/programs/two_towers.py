"""Train two towers for retrieval with Adam over *all* the model's named parameters.

Modelled on TorchRec's retrieval example: the tables' optimizer is row-wise Adagrad, requested
through the sharder, and Adam gets the tables' parameters as well, which it never steps: they have
no gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.programs.batches import Clicks
from tests.programs.session import INTERVAL, STEPS, AfterStep, Ended, run
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive

ROWS = {"user": 2000, "movie": 1500}
DIM, RATE = 16, 0.01


class TwoTowers(nn.Module):
    """A net that scores a user's and a movie's embeddings by their projections' inner product."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ]
        self.embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.query = MLP(in_size=DIM, layer_sizes=[16, 8])
        self.candidate = MLP(in_size=DIM, layer_sizes=[16, 8])

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.embeddings(batch.sparse_features)
        scores = (self.query(pooled["user"]) * self.candidate(pooled["movie"])).sum(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels.float())
        return loss, scores.detach()


def main(root: str, after_step: AfterStep) -> Ended:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    device = torch.device("cpu")
    towers = TwoTowers()
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"learning_rate": RATE, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type)
    )
    plan = planner.collective_plan(towers, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(towers, device=device, plan=plan, sharders=[sharder])
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()),
        lambda parameters: torch.optim.Adam(parameters, lr=RATE),
    )

    reports: list[CheckpointReport] = []
    checkpointer = Checkpointer(
        root,
        model=model,
        state={"optimizer": optimizer},
        policy=Consecutive(),
        every_steps=INTERVAL,
        when_busy="wait",
        callbacks=[reports.append],
    )
    checkpointer.restore()
    resumed_from = checkpointer.steps

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    data = Clicks(ROWS, dist.get_rank(), STEPS, first=resumed_from)
    batches = iter(DataLoader(data, batch_size=None))
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        checkpointer.step()
        after_step(checkpointer.steps)
    checkpointer.close()
    return Ended({"model": model, "optimizer": optimizer}, reports, resumed_from)


if __name__ == "__main__":
    run(main)
