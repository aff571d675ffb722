"""Make a small model on one GPU: two tables in any compute kernel, with any fused optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import optimizers
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun import Checkpointer, Consecutive

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = torch.device("cuda", 0)
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")
FUSED: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "partial_rowwise_adam": optimizers.PartialRowWiseAdam,
    "lamb": optimizers.LAMB,
    "partial_rowwise_lamb": optimizers.PartialRowWiseLAMB,
}
DENSE: dict[str, Any] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}
SAMPLES, LOOKUPS = 16, 2
State = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self, embeddings: nn.Module, dim: int, sequence: bool) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._sequence = sequence
        self.out = nn.Linear(dim if sequence else 2 * dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        looked_up = self.embeddings(features)
        if self._sequence:
            values = torch.cat([jagged.values() for jagged in looked_up.values()])
        else:
            values = looked_up.values()
        loss: torch.Tensor = (self.out(values) - 1).square().mean()
        return loss


@dataclass
class GpuJob:
    """A model that trains; every batch looks up a few rows of each table."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    rows: int
    steps: int = 0

    def batch(self) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(self.steps)
        ids = torch.randint(0, self.rows, (2 * SAMPLES * LOOKUPS,), generator=generator)
        lengths = torch.full((2 * SAMPLES,), LOOKUPS)
        return KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths).to(DEVICE)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.batch()).backward()
            self.optimizer.step()
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        state = {"optimizer": self.optimizer, "job": self}
        return Checkpointer(root, model=self.model, state=state, policy=Consecutive(), **options)

    def everything(self) -> State:
        """Copy model and optimizer by TorchRec's state dicts, which flush caches, to the CPU."""
        found: State = {}
        _collect(self.model.state_dict(), "model", found)
        _collect(self.optimizer.state_dict(), "optimizer", found)
        return found

    def counters(self) -> list[int]:
        """Return the fused optimizers' counters."""
        return [
            int(kernel._emb_module.iter)
            for module in self.model.modules()
            for lookup in getattr(module, "_lookups", [])
            for kernel in getattr(lookup, "_emb_modules", [])
        ]


def _collect(value: Any, path: str, found: State) -> None:
    if hasattr(value, "local_shards"):  # the whole table is on this rank
        for number, shard in enumerate(value.local_shards()):
            found[f"{path}#{number}"] = shard.tensor.detach().cpu().clone()
    elif isinstance(value, torch.Tensor):
        found[path] = value.detach().cpu().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}/{key}", found)


def build(
    kernel: str,
    fused: str = "rowwise_adagrad",
    *,
    sequence: bool = False,
    dense: str = "adagrad",
    rows: int = 300,
    dim: int = 8,
    cache: float = 0.2,
    seed: int = 0,
) -> GpuJob:
    """Shard a model over the one GPU.

    Args:
        kernel: TorchRec's compute kernel, or ``data_parallel``.
        dense: the dense optimizer, which steps data-parallel tables as well.
        cache: number of a table's rows that fit into the cache.
    """
    torch.manual_seed(seed)
    meta = torch.device("meta")
    embeddings: nn.Module
    sharder: Any
    fused_params = {"cache_load_factor": cache}
    if sequence:
        embeddings = EmbeddingCollection(
            tables=[EmbeddingConfig(**_config(n, rows, dim)) for n in (0, 1)], device=meta
        )
        sharder = EmbeddingCollectionSharder(fused_params)
    else:
        embeddings = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(**_config(n, rows, dim)) for n in (0, 1)], device=meta
        )
        sharder = EmbeddingBagCollectionSharder(fused_params)
    if kernel == "data_parallel":
        shardings = {"t0": data_parallel(), "t1": data_parallel()}
    else:
        shardings = {
            "t0": table_wise(rank=0, compute_kernel=kernel),
            "t1": row_wise(compute_kernel=kernel),
        }
        apply_optimizer_in_backward(FUSED[fused], embeddings.parameters(), {"lr": 0.02})
    plan = construct_module_sharding_plan(
        embeddings,
        shardings,
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=DEVICE.type,
    )
    model = DistributedModelParallel(
        Net(embeddings, dim, sequence),
        device=DEVICE,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
    )
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapper = KeyedOptimizerWrapper(parameters, DENSE[dense])
    return GpuJob(model, CombinedOptimizer([model.fused_optimizer, ("dense", wrapper)]), rows)


def _config(number: int, rows: int, dim: int) -> dict[str, Any]:
    return {
        "name": f"t{number}",
        "num_embeddings": rows,
        "embedding_dim": dim,
        "feature_names": [f"f{number}"],
    }


def assert_equal(found: State, wanted: State, exact: bool = True) -> None:
    """Compare bit for bit, or up to rounding."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if exact:
            assert tensor.numpy().tobytes() == wanted[name].numpy().tobytes(), name
        else:
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-7, msg=name)
