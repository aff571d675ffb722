"""Make the model that every system checkpoints: a DLRM with Criteo Kaggle's 26 tables, scaled."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recipes.benchmarks.side_by_side.trace import Kind, Trace
from recipes.dlrm_criteo import sharding
from recipes.dlrm_criteo.model import Architecture, initialise_dense, table_values
from recipes.dlrm_criteo.train import CONFIGS
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.shards import LocalShard

KAGGLE_ROWS = 33_762_577
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """The settings of training.

    Attributes:
        rows: of all tables together.
        batch: samples of a step, over all ranks.
        steps: in an interval between two checkpoints.
        threads: of torch, on each rank.
    """

    rows: int = 4_960_000
    dim: int = 64
    batch: int = 2048
    steps: int = 16
    threads: int = 1
    trace: Kind = "skewed"


def architecture(setting: Setting) -> Architecture:
    """Return the recipe's `dlrm_kaggle`, at the setting's width and number of rows."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        model = compose("train", ["model=dlrm_kaggle"]).model
    found: Architecture = instantiate(
        model,
        scale=setting.rows / KAGGLE_ROWS,
        embedding_dim=setting.dim,
        bottom_mlp=[*list(model.bottom_mlp)[:-1], setting.dim],
    )
    return found


class Job:
    """The model in training, on the ranks of the default process group.

    Args:
        dtensor: whether its state dict has DTensors in place of ShardedTensors.
        drawn_here: whether the tables get the recipe's starting values in place of TorchRec's.
    """

    def __init__(self, setting: Setting, dtensor: bool = False, drawn_here: bool = True) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        # Hides warnings that TorchRec traces a model
        logging.getLogger("torch.fx").setLevel(logging.ERROR)
        torch.set_num_threads(setting.threads)
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
        self.setting = setting
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        built = architecture(setting)
        self.trace = Trace(built.num_embeddings_per_feature, setting.trace)
        dlrm = built.build(_CPU)
        initialise_dense(dlrm, seed=0)
        with initialize_config_dir(str(CONFIGS), version_base=None):
            optimizers = instantiate(compose("train", ["optimizer=rowwise_adagrad"]).optimizer)
        tables = optimizers["tables"]
        apply_optimizer_in_backward(
            tables.func, dlrm.model.sparse_arch.parameters(), dict(tables.keywords)
        )
        self.model = DistributedModelParallel(
            dlrm,
            env=ShardingEnv(self.ranks, self.rank, dist.GroupMember.WORLD, output_dtensor=dtensor),
            device=_CPU,
            plan=sharding.table_wise(dlrm, _CPU),
            sharders=[sharding.Sharder()],
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())), optimizers["dense"]
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.shards = [s for kernel in find_kernels(self.model)[0] for s in kernel.shards]
        for shard in self.shards if drawn_here else ():
            initialise(shard)

    @property
    def state(self) -> dict[str, Any]:
        """Return the state that stock checkpointing saves."""
        return {"model": self.model, "optimizer": self.optimizer}

    def batches(self, interval: int) -> list[Batch]:
        """Return this rank's part of an interval's steps."""
        setting = self.setting
        return self.trace.batches(interval, setting.steps, setting.batch, self.rank, self.ranks)

    def step(self, batch: Batch) -> None:
        """Do one training step."""
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()

    def together(self) -> None:
        """Wait for the other ranks."""
        if self.ranks > 1:
            dist.barrier()

    def modified(self, interval: int) -> list[tuple[LocalShard, torch.Tensor]]:
        """Return this rank's shards, and their row positions (int64) that an interval modifies."""
        names = [f"t_{feature}" for feature in DEFAULT_CAT_NAMES]
        rows = dict(zip(names, self.trace.rows(interval), strict=True))
        return [(s, torch.from_numpy(rows[s.table.rsplit(".", 1)[1]])) for s in self.shards]


def initialise(shard: LocalShard) -> None:
    """Fill a table that one rank holds whole with the recipe's starting values."""
    name, shape = f"{shard.table}.weight", (shard.shape.rows, shard.shape.dim)
    for first, values in table_values(0, name, shape, 0, shard.shape.rows):
        shard.weight[first : first + len(values)] = torch.from_numpy(values)
