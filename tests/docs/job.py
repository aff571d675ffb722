"""Define the small job behind the pages' examples: ``dmp``, ``optimizer``, ``reader``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = {"t_cat_0": 7, "t_cat_3": 22_000, "t_cat_23": 14_300, "t_user": 30_000}
DIM, BATCH, DENSE = 16, 16, 4

Batch = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]


class Model(nn.Module):
    """A model of four tables beside four dense features."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name[2:]]
            )
            for name, rows in ROWS.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over_arch = nn.Linear(DENSE + DIM * len(ROWS), 1)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over_arch(torch.cat([dense, self.ebc(ids).values()], dim=1))
        return logits.squeeze(1)


@dataclass
class Reader:
    """A reader of batches computed from their numbers; the next number is its state."""

    batches: int
    position: int = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.batches:
            self.position += 1
            generator = torch.Generator().manual_seed(self.position)
            skewed = torch.rand(len(ROWS), BATCH, generator=generator) ** 4
            sizes = torch.tensor(list(ROWS.values())).unsqueeze(1)
            ids = KeyedJaggedTensor(
                keys=[name[2:] for name in ROWS],
                values=(skewed * sizes).long().reshape(-1),
                lengths=torch.ones(len(ROWS) * BATCH, dtype=torch.long),
            )
            dense = torch.rand(BATCH, DENSE, generator=generator)
            yield dense, ids, (dense.sum(dim=1) > DENSE / 2).float()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Job:
    """A model on one rank, with its optimizer and its reader."""

    batches: int = 300
    dmp: nn.Module = field(init=False)
    optimizer: CombinedOptimizer = field(init=False)
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = Model()
        apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05})
        self.dmp = DistributedModelParallel(model, device=torch.device("cpu"))
        dense = KeyedOptimizerWrapper(
            {name: value for name, value in self.dmp.named_parameters() if "over_arch" in name},
            lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        )
        fused = self.dmp.fused_optimizer
        self.optimizer = CombinedOptimizer([("tables", fused), ("dense", dense)])
        self.reader = Reader(self.batches)

    def unhurried_step(self, batch: Batch) -> None:
        """Train as slowly as a larger model: a hundred steps outlast a checkpoint."""
        self.train_step(batch)
        time.sleep(0.003)

    def train_step(self, batch: Batch) -> None:
        dense, ids, labels = batch
        self.optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self.dmp(dense, ids), labels)
        loss.backward()
        self.optimizer.step()

    def train(self, steps: int, after: Callable[[], object] = lambda: None) -> None:
        batches = iter(self.reader)
        for _ in range(steps):
            self.train_step(next(batches))
            after()
