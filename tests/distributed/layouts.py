"""Models in any layout, and what they should hold and train to, said without the package.

A layout is a plan (a sharding per table), a number of ranks and of nodes. Every job here trains the
same global batches, whatever its layout; ``Reference`` trains them without TorchRec and unsharded,
from a state that was put together from TorchRec's own state dicts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import optimizers
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.models import (
    CPU,
    DENSE_FEATURES,
    Job,
    Model,
    ModelSpec,
    Plan,
    TableSpec,
    _pool,
    gather,
)

BATCH = 24
"""Samples of a global batch: any of the world sizes 1, 2, 3, 4 and 8 divides it."""
LEARNING_RATE = 0.05
EPS = 1e-3
"""Large, so that a tiny gradient's rounding is not a step of full length."""
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": LEARNING_RATE}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": LEARNING_RATE, "eps": EPS}),
    "adagrad": (torch.optim.Adagrad, {"lr": LEARNING_RATE, "eps": EPS}),
    # Sharded tables of these can be built on a CPU, but not trained (fused_on_cpu.py).
    "adam": (torch.optim.Adam, {"lr": LEARNING_RATE, "eps": EPS}),
    "partial_rowwise_adam": (optimizers.PartialRowWiseAdam, {"lr": LEARNING_RATE}),
    "lamb": (optimizers.LAMB, {"lr": LEARNING_RATE}),
    "partial_rowwise_lamb": (optimizers.PartialRowWiseLAMB, {"lr": LEARNING_RATE}),
}


@dataclass(frozen=True)
class Layout:
    """Where the rows are.

    Attributes:
        plan: by ``collection.table``: ``table_wise:RANK``, ``row_wise``,
            ``column_wise:RANK,RANK…``, ``columns:SIZE,SIZE…`` (one shard on each rank),
            ``table_row_wise:NODE``,
            ``grid_shard:NODE,NODE…`` or ``data_parallel``.
        local_size: ranks per node.
        prefix: of the names of data-parallel tables in the combined optimizer.
    """

    plan: Plan
    world_size: int
    local_size: int = 0
    prefix: str = "tables"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Layout:
        return cls(**document)

    @property
    def ranks_per_node(self) -> int:
        return self.local_size or self.world_size

    def widths(self, name: str, dim: int) -> list[int]:
        """How many columns each of a table's column shards has."""
        kind, _, rest = self.plan[name].partition(":")
        if kind == "columns":
            return [int(size) for size in rest.split(",")]
        parts = len(rest.split(",")) if kind in ("column_wise", "grid_shard") else 1
        return [dim // parts] * parts


def splits_into_whole_blocks(rows: int, ranks: int) -> bool:
    """Whether every rank gets rows of a row-wise table; FBGEMM's CPU kernels can't train others."""
    return rows > -(-rows // ranks) * (ranks - 1)


def table_names(spec: ModelSpec) -> dict[str, tuple[str, TableSpec]]:
    """By state-dict name without ``.weight``, the name in plans, and the table."""
    names = [f"{c.name}.{t.name}" for c in spec.collections for t in c.tables]
    return {p: (n, t) for (p, t), n in zip(spec.table_paths.items(), names, strict=True)}


class OrderedModel(Model):
    """Takes what was looked up by name: TorchRec's own order depends on the sharding."""

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        parts = [dense]
        for collection in self._collections:
            looked_up = getattr(self, collection.name)(features)
            if not collection.bag:
                parts.append(_pool(list(looked_up.values()), dense.shape[0]))
                continue
            pairs = [(t.name, f) for t in collection.tables for f in t.features]
            uses = Counter(feature for _, feature in pairs)
            parts += [looked_up[f"{f}@{t}" if uses[f] > 1 else f] for t, f in pairs]
        hidden = torch.tanh(self.hidden(torch.cat(parts, dim=1)))
        return self.out(hidden).squeeze(1)


@dataclass
class LayoutJob(Job):
    """A job whose ranks share global batches."""

    def batch(
        self, step: int, rows: Mapping[str, int] | None = None
    ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """This rank's slice of the global batch."""
        dense, features = global_batch(self.spec, self.data_seed, step)
        share = BATCH // dist.get_world_size()
        own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        return dense[own], keyed([bags[own] for bags in features.values()], list(features))

    def loss(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return (self.model(dense, sparse) - dense.sum(dim=1)).square().mean()


def global_batch(
    spec: ModelSpec, data_seed: int, step: int
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Dense features ``(BATCH, …)``, and per feature a bag of zero to two ids for each sample."""
    generator = torch.Generator().manual_seed(data_seed * 1009 + step)
    dense = torch.randn(BATCH, DENSE_FEATURES, generator=generator)
    features = {}
    for feature, rows in spec.features.items():
        lengths = torch.randint(0, 3, (BATCH,), generator=generator)
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        features[feature] = list(ids.split(lengths.tolist()))
    return dense, features


def keyed(features: Sequence[Sequence[torch.Tensor]], names: list[str]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=names,
        values=torch.cat([ids for bags in features for ids in bags]),
        lengths=torch.tensor([len(ids) for bags in features for ids in bags]),
    )


def build(
    spec: dict[str, Any],
    layout: dict[str, Any],
    seed: int = 0,
    *,
    half: bool = False,
    dtensor: bool = False,
    dense_table_optimizer: str | None = None,
) -> LayoutJob:
    """Shards a model; data-parallel tables get their optimizer among the dense ones.

    Args:
        half: fp16 tables.
        dtensor: sharded tensors of the state dict are DTensor.
        dense_table_optimizer: of the data-parallel tables, if another than the fused one.
    """
    model_spec, where = ModelSpec.from_json(spec), Layout.from_json(layout)
    assert dist.get_world_size() == where.world_size
    # Groups within and across nodes are kept for the process; an earlier case's are gone.
    torchrec_comm._INTRA_PG = torchrec_comm._CROSS_PG = None
    os.environ["LOCAL_WORLD_SIZE"] = str(where.ranks_per_node)
    torch.manual_seed(seed)
    module = OrderedModel(model_spec)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plans = {}
    optimizer_type, options = OPTIMIZERS[model_spec.fused]
    for collection in model_spec.collections:
        tables = getattr(module, collection.name)
        if half:
            tables.half()
            for config in tables.embedding_bag_configs():
                config.data_type = DataType.FP16
        shardings = {}
        for path, (name, table) in table_names(model_spec).items():
            if not path.startswith(f"{collection.name}."):
                continue
            shardings[table.name] = generator_of(where.plan[name])
            if where.plan[name] != "data_parallel":
                weight = module.get_parameter(f"{path}.weight")
                apply_optimizer_in_backward(optimizer_type, [weight], dict(options))
        plans[collection.name] = construct_module_sharding_plan(
            tables,
            shardings,
            sharder=sharders[0 if collection.bag else 1],
            local_size=where.ranks_per_node,
            world_size=where.world_size,
            device_type="cpu",
        )
    torch.manual_seed(seed + 1000 * dist.get_rank())  # ranks hold different rows
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = dtensor
    model = DistributedModelParallel(
        module, env=env, device=CPU, plan=ShardingPlan(plans), sharders=sharders
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    weights = {f"{path}.weight" for path in model_spec.table_paths}
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [model.fused_optimizer]
    replicated = {name: dense.pop(name) for name in sorted(dense.keys() & weights)}
    if replicated:
        kind, options = OPTIMIZERS[dense_table_optimizer or model_spec.fused]
        parts.append(
            (where.prefix, KeyedOptimizerWrapper(replicated, lambda p: kind(p, **options)))
        )
    kind, options = OPTIMIZERS[model_spec.dense]
    parts.append(("dense", KeyedOptimizerWrapper(dense, lambda p: kind(p, **options))))
    return LayoutJob(model_spec, model, CombinedOptimizer(parts))


def generator_of(sharding: str, kernel: str | None = None) -> Any:
    """TorchRec's sharding of a table, from its name in a plan.

    Args:
        kernel: the compute kernel of a table-, row- or column-wise table; by default the one that
            fits its optimizer.
    """
    kind, _, rest = sharding.partition(":")
    numbers = [int(number) for number in rest.split(",")] if rest else []
    fused = {} if kernel is None else {"compute_kernel": kernel}
    return {
        "table_wise": lambda: table_wise(rank=numbers[0], **fused),
        "row_wise": lambda: row_wise(**fused),
        "column_wise": lambda: column_wise(ranks=numbers, **fused),
        "columns": lambda: column_wise(size_per_rank=numbers, **fused),
        "table_row_wise": lambda: table_row_wise(host_index=numbers[0]),
        "grid_shard": lambda: grid_shard(host_indexes=numbers),
        "data_parallel": data_parallel,
    }[kind]()


@dataclass
class Whole:
    """A model's state unsharded.

    Attributes:
        weights: ``(rows, dim)`` by table.
        states: optimizer state by table, ``(rows, dim)``: a row-wise value stands in every column
            that it is for. Empty if the optimizer has none.
        rest: everything that isn't of a table.
    """

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    rest: dict[str, np.ndarray] = field(default_factory=dict)

    def store(self, path: str | Path) -> None:
        parts = {"weights": self.weights, "states": self.states, "rest": self.rest}
        arrays: dict[str, Any] = {
            f"{part}:{key}".replace("/", "|"): value
            for part, values in parts.items()
            for key, value in values.items()
        }
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Whole:
        whole = cls()
        with np.load(path) as file:
            for name in file.files:
                part, _, key = name.replace("|", "/").partition(":")
                getattr(whole, part)[key] = file[name]
        return whole

    def copy(self) -> Whole:
        return Whole(*({k: v.copy() for k, v in p.items()} for p in vars(self).values()))


def whole_state(job: LayoutJob, layout: dict[str, Any]) -> Whole:
    """Put together from TorchRec's state dicts; call it on all ranks, every rank gets it."""
    where = Layout.from_json(layout)
    state = gather(job)
    whole = Whole()
    for path, (name, table) in table_names(job.spec).items():
        whole.weights[path] = state.pop(f"model/{path}.weight")
        for key in [key for key in state if f"{path}.weight/" in key]:
            value = state.pop(key)
            if key.endswith("/step"):
                continue  # of a data-parallel table's dense optimizer
            assert key.rsplit("/", 1)[-1] in (f"{table.name}.momentum1", "sum"), key
            if value.ndim == 1:
                widths = where.widths(name, table.dim)
                parts = value.reshape(len(widths), table.rows)
                value = np.repeat(parts, widths, axis=0).T
            whole.states[path] = np.broadcast_to(value, (table.rows, table.dim)).copy()
    whole.rest = state
    return whole


def expected(
    whole: Whole, spec: ModelSpec, source: Layout, target: Layout, *, pointwise: bool
) -> tuple[Whole, set[str]]:
    """What a restore on another layout should give, and the tables whose state is converted."""
    wanted, converted = whole.copy(), set()
    for path, (name, table) in table_names(spec).items():
        widths = target.widths(name, table.dim)
        if path not in whole.states or pointwise or widths == source.widths(name, table.dim):
            continue
        converted.add(path)
        blocks = np.split(whole.states[path].astype(np.float64), np.cumsum(widths)[:-1], axis=1)
        means = [block.mean(axis=1, keepdims=True).repeat(block.shape[1], 1) for block in blocks]
        wanted.states[path] = np.concatenate(means, axis=1).astype(np.float32)
    return wanted, converted


def differences(found: Whole, wanted: Whole, converted: set[str], exact: bool = True) -> list[str]:
    """What isn't as it should be: bit for bit, but for converted state (and if not ``exact``)."""
    problems = []
    for part in ("weights", "states", "rest"):
        a, b = getattr(found, part), getattr(wanted, part)
        problems += [f"only in one of them: {part} {name}" for name in a.keys() ^ b.keys()]
        for name in sorted(a.keys() & b.keys()):
            if a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
                problems.append(f"{part} {name}: {a[name].dtype}{a[name].shape}")
                continue
            if exact and not (part == "states" and name in converted):
                equal = a[name].tobytes() == b[name].tobytes()
            else:
                rtol, atol = (3e-7, 0.0) if exact else (1e-6, 1e-6)
                equal = np.allclose(a[name], b[name], rtol=rtol, atol=atol)
            if not equal:
                error = abs(a[name].astype(np.float64) - b[name]).max()
                problems.append(f"{part} {name}: off by {error:.3g}")
    return problems


class Reference:
    """The same model in plain PyTorch, unsharded, all samples in one process."""

    def __init__(self, spec: ModelSpec, whole: Whole, layout: Layout, data_seed: int = 0) -> None:
        self._spec, self._layout, self._data_seed = spec, layout, data_seed
        self.whole = whole.copy()

    def train(self, first: int, steps: int) -> None:
        """Trains those batches; row-wise Adagrad per column shard of the layout."""
        for step in range(first, first + steps):
            tables = {
                k: torch.from_numpy(v).requires_grad_() for k, v in self.whole.weights.items()
            }
            dense = {
                k: torch.from_numpy(v).requires_grad_()
                for k, v in self.whole.rest.items()
                if k.startswith("model/")
            }
            self._loss(tables, dense, step).backward()
            with torch.no_grad():
                for path, (name, table) in table_names(self._spec).items():
                    self._update_table(tables[path], path, self._layout.widths(name, table.dim))
                for name, parameter in dense.items():
                    self._update_dense(parameter, name.removeprefix("model/"))

    def _loss(
        self, tables: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        inputs, features = global_batch(self._spec, self._data_seed, step)
        parts = [inputs]
        paths = iter(self._spec.table_paths)
        for collection in self._spec.collections:
            pooled = [
                torch.stack([tables[path][ids].sum(dim=0) for ids in features[feature]])
                for table, path in zip(collection.tables, paths, strict=False)
                for feature in table.features
            ]
            parts.append(torch.cat(pooled, dim=1) if collection.bag else torch.stack(pooled).sum(0))
        hidden = torch.tanh(
            torch.cat(parts, dim=1) @ dense["model/hidden.weight"].T + dense["model/hidden.bias"]
        )
        out = (hidden @ dense["model/out.weight"].T + dense["model/out.bias"]).squeeze(1)
        return (out - inputs.sum(dim=1)).square().mean()

    def _update_table(self, weight: torch.Tensor, path: str, widths: list[int]) -> None:
        gradient = weight.grad
        assert gradient is not None
        if self._spec.fused == "sgd":
            weight -= LEARNING_RATE * gradient
            return
        state = torch.from_numpy(self.whole.states[path])
        if self._spec.fused == "adagrad":
            state += gradient.square()
        else:
            for part, of_part in zip(
                state.split(widths, dim=1), gradient.split(widths, dim=1), strict=True
            ):
                part += of_part.square().mean(dim=1, keepdim=True)
        weight -= LEARNING_RATE * gradient / (state.sqrt() + EPS)

    def _update_dense(self, parameter: torch.Tensor, name: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._spec.dense == "sgd":
            parameter -= LEARNING_RATE * gradient
            return
        state = torch.from_numpy(self.whole.rest[f"optimizer/state/dense.{name}/sum"])
        state += gradient.square()
        self.whole.rest[f"optimizer/state/dense.{name}/step"] += 1
        parameter -= LEARNING_RATE * gradient / (state.sqrt() + EPS)
