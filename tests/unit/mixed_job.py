"""Make a small sharded net whose tables are data parallel in part, with a Checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.unit.tracked_model import Model, batch
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import SaveDeferred


class Net(nn.Module):
    """A net of a dense part and tables: ``wide`` is data parallel, ``tall`` and ``split`` fused."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = Model()
        self.out = nn.Linear(32, 1)

    def forward(self, **bags: list[list[int]]) -> torch.Tensor:
        out: torch.Tensor = self.out(self.sparse(batch(**bags))).square().sum()
        return out


class Job:
    """A sharded net with its optimizer and a checkpointer."""

    def __init__(
        self, root: Path, dense: Callable[[Any], torch.optim.Optimizer], **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.root = root
        net = Net()
        tables = net.sparse.ebc.embedding_bags
        for name in ("tall", "split"):
            apply_optimizer_in_backward(RowWiseAdagrad, tables[name].parameters(), {"lr": 0.5})
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            net.sparse.ebc,
            {"wide": data_parallel(), "tall": table_wise(rank=0), "split": table_wise(rank=0)},
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            net,
            device=torch.device("cpu"),
            plan=ShardingPlan({"sparse.ebc": plan}),
            sharders=[sharder],
        )
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = KeyedOptimizerWrapper(parameters, dense)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, ("dense", self.dense)])
        self.parameters = list(parameters.values())
        self.saver = Checkpointer(
            root,
            model=self.model,
            state={"optimizer": self.optimizer},
            policy=Consecutive(),
            retention=None,
            **options,
        )

    def backward(self, factor: float = 1.0) -> None:
        loss = self.model(a=[[1, 2]], shared=[[3]], b=[[4]])
        (loss * factor).backward()

    def saves(self) -> bool:
        self.saver.steps += 1
        try:
            self.saver.save()
        except SaveDeferred:
            return False
        return True
