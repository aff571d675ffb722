"""Train a model of several kernels with a dense part, and build what serves it from scratch.

Annotations are evaluated here: TorchScript needs them.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_checknrun import Checkpointer, Consecutive, Follower, Version

CPU = torch.device("cpu")
ROWS = 40
TYPES = {8: torch.qint8, 4: torch.quint4x2, 2: torch.quint2x4}


class Net(nn.Module):
    """Two bag kernels (SUM and MEAN) of two dims, a sequence table, a buffer and a dense layer."""

    def __init__(self, device: torch.device = CPU, sequence: bool = True, rows: int = ROWS) -> None:
        super().__init__()
        bags = [
            ("wide", 8, "a", PoolingType.SUM),
            ("mean", 16, "b", PoolingType.MEAN),
            ("tall", 16, "b", PoolingType.SUM),
        ]
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[feature],
                    pooling=pooling,
                )
                for name, dim, feature, pooling in bags
            ],
            device=device,
        )
        self.ec = None
        if sequence:
            self.ec = EmbeddingCollection(
                [
                    EmbeddingConfig(
                        name="wide", num_embeddings=rows, embedding_dim=8, feature_names=["a"]
                    )
                ],
                device=device,
            )
        self.over = nn.Linear(40, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.over(self.ebc(features).values()) + self.seen  # also when traced
        if self.ec is not None:
            pooled = pooled + self.ec(features)["a"].values().sum()
        answer: torch.Tensor = pooled
        return answer


def mapping(rows: int, **options: Any) -> MCHManagedCollisionModule:
    """Make a module that maps raw ids below 1,000 to rows."""
    return MCHManagedCollisionModule(
        zch_size=rows,
        device=CPU,
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=10,
        input_hash_size=1000,
        **options,
    )


class Job:
    """A training job on one rank, with a Checkpointer.

    Args:
        sharding: of the table ``tall``.
        rows: of each table.
    """

    def __init__(
        self, root: Path | str, sharding: str = "row_wise", rows: int = ROWS, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.rows = rows
        model = Net(torch.device("meta"), rows=rows)
        apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.5})
        assert model.ec is not None
        apply_optimizer_in_backward(RowWiseAdagrad, model.ec.parameters(), {"lr": 0.5})
        whole = table_wise(rank=0)
        tall = column_wise(ranks=[0, 0]) if sharding == "column_wise" else row_wise()
        plans, sharders = {}, [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        for name, sharder, tables in (
            ("ebc", sharders[0], {"wide": whole, "mean": whole, "tall": tall}),
            ("ec", sharders[1], {"wide": whole}),
        ):
            plans[name] = construct_module_sharding_plan(
                getattr(model, name),
                tables,
                sharder=sharder,
                local_size=1,
                world_size=1,
                device_type="cpu",
            )
        self.model = DistributedModelParallel(
            model, device=CPU, plan=ShardingPlan(plans), sharders=sharders
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda params: torch.optim.SGD(params, lr=0.1),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        options = {"policy": Consecutive(), "retention": None, "chunk_bytes": 1500, **options}
        self.saver = Checkpointer(
            root, model=self.model, state={"optimizer": self.optimizer}, **options
        )

    def train(self, seed: int, samples: int = 3) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        self.model(batch(seed, samples, self.rows)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.module.seen.add_(0.25)
        self.saver.step()

    def save(self) -> None:
        self.saver.save()
        self.saver.wait()


def batch(seed: int, samples: int = 3, rows: int = ROWS) -> KeyedJaggedTensor:
    """Draw a batch; each sample has two ids of each feature."""
    generator = torch.Generator().manual_seed(seed)
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.randint(0, rows, (4 * samples,), generator=generator),
        lengths=torch.full((2 * samples,), 2),
    )


def every_row() -> KeyedJaggedTensor:
    """Return a batch that looks up every row of every table, one a sample."""
    ids = torch.arange(ROWS)
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.cat([ids, ids]), lengths=torch.ones(2 * ROWS).long()
    )


def restored(root: Path | str, checkpoint: str | None = None, **job: Any) -> Net:
    """Restore a checkpoint as training would, and return the plain model of that state."""
    other = Job(root, **job)
    try:
        assert other.saver.restore(checkpoint=checkpoint) is not None
        plain = Net(rows=other.rows)
        with torch.no_grad():
            for name, value in other.model.state_dict().items():
                into = plain.state_dict()[name]
                if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
                    into.copy_(value)
                    continue
                for shard in value.local_shards():
                    row, col = shard.metadata.shard_offsets
                    part = shard.tensor
                    into[row : row + part.shape[0], col : col + part.shape[1]] = part
        return plain.eval()
    finally:
        other.saver.close()


def quantized(model: nn.Module, bits: int | None) -> Any:
    """Return what TorchRec serves; None: the model as it is."""
    own = copy.deepcopy(model).eval()
    if bits is None:
        return own
    return quantize_inference_model(own, quantization_dtype=TYPES[bits])


def kernels(model: Any) -> list[Any]:
    """Return the inference kernels of a model's bags."""
    return list(model.ebc._emb_modules)


def kernel_bytes(model: nn.Module) -> list[torch.Tensor]:
    """Return the memory of all inference kernels, padding included, or the weights themselves."""
    found = []
    for name in ("ebc", "ec"):
        module = getattr(model, name)
        kernels = getattr(module, "_emb_modules", None)
        if kernels:
            found += [kernel.weights_host for kernel in kernels]
        elif module is not None:
            found += [weight.detach().view(torch.uint8) for weight in module.parameters()]
    return found


def served(follower: Follower) -> Version:
    """Poll, and return the version that is served."""
    version = follower.poll()
    assert version is not None
    return version


def newest(root: Path) -> Path:
    """Return the newest directory of a root."""
    return max(root.glob("seq-*"))


def differences(follower: Follower, wanted: nn.Module) -> list[str]:
    """Compare a follower's tables and answers with those of a model made from scratch."""
    found = []
    with follower.read() as (model, _), torch.no_grad():
        for number, (own, other) in enumerate(
            zip(kernel_bytes(model), kernel_bytes(wanted), strict=True)
        ):
            if not torch.equal(own, other):
                found.append(f"memory {number}: {int((own != other).sum())} bytes differ")
        if not torch.equal(model(every_row()), wanted(every_row())):
            found.append("answers differ")
    return found


def follows(job: Job, root: Path, follower: Follower, bits: int) -> None:
    """Train and follow; compare answers for every row with a model made from scratch."""
    for seed in (1, 2):
        job.train(seed)
        job.save()
        version = follower.poll()
        assert version is not None
        assert version.error is None
        wanted = restored(root)
        with follower.read() as (model, _), torch.no_grad():
            sequence = hasattr(model, "ec") and model.ec is not None
            if not sequence:
                wanted.ec = None
            # A sharded model divides its batch by features, as its plan says.
            assert torch.equal(model(every_row()), quantized(wanted, bits)(every_row()))
