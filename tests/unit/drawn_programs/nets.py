"""Build the net of a drawn program: tables of one kind, and layers with a peculiarity."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.zoo import EMA, ZooBatch
from tests.unit.drawn_programs.programs import Program

SAMPLES, DIM, HIDDEN = 5, 8, 8
ROWS = {"t0": 41, "t1": 26, "t2": 30}
FEATURES = {"t0": ["f0", "f1"], "t1": ["f1"], "t2": ["f2"]}
"""One feature in two tables, and a table with two features."""
IDS = {"f0": 41, "f1": 26, "f2": 30}
MAPPED = {"t0": ["f0", "f1"], "t1": ["f2"], "t2": ["f3"]}
RAW_IDS = 120
"""Bounds ids that are mapped to rows: each feature has a table of its own then."""
EVICTIONS = {
    "t0": DistanceLFU_EvictionPolicy,
    "t1": LFU_EvictionPolicy,
    "t2": LRU_EvictionPolicy,
}


def embeddings(program: Program) -> tuple[nn.Module, nn.Module, Any]:
    """Return a module of tables, the collection in it, and its sharder."""
    meta = torch.device("meta")
    shared: dict[str, Any] = {"embedding_dim": DIM}
    if program.half:
        shared["data_type"] = DataType.FP16
    features = features_of(program.tables)
    named = [{"name": t, "num_embeddings": ROWS[t], "feature_names": features[t]} for t in ROWS]
    fused = EMA if program.fused == "ema" else None
    if program.tables == "sequence":
        sequence = EmbeddingCollection(
            tables=[EmbeddingConfig(**each, **shared) for each in named], device=meta
        )
        return sequence, sequence, EmbeddingCollectionSharder(fused)
    weighted = program.tables in ("weighted", "processed")
    bags = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(**each, **shared, pooling=PoolingType.SUM) for each in named],
        device=meta,
        is_weighted=weighted,
    )
    if program.tables == "processed":
        processors = PositionWeightedModuleCollection(dict.fromkeys(IDS, 4))
        processed = FeatureProcessedEmbeddingBagCollection(bags, processors)
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(fused)
        )
        return processed, bags, sharder
    if program.tables == "mapped":
        return mapped(bags), bags, ManagedCollisionEmbeddingBagCollectionSharder()
    return bags, bags, EmbeddingBagCollectionSharder(fused)


def features_of(tables: str) -> dict[str, list[str]]:
    """Return the features of each table, by the kind of tables."""
    return MAPPED if tables == "mapped" else FEATURES


def mapped(bags: EmbeddingBagCollection) -> nn.Module:
    """Put managed collisions before tables: each maps raw ids to rows in a way of its own."""
    modules = {
        table: MCHManagedCollisionModule(
            zch_size=rows,
            device=torch.device("cpu"),
            eviction_policy=EVICTIONS[table](),
            eviction_interval=number + 2,
            input_hash_size=RAW_IDS,
        )
        for number, (table, rows) in enumerate(ROWS.items())
    }
    collection = ManagedCollisionCollection(modules, bags.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(
        bags, collection, allow_in_place_embed_weight_update=True
    )


class Late(nn.Module):
    """A layer that makes its buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = torch.zeros_like(x[0])
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x - self.mean


class Remembering(nn.Module):
    """A layer whose extra state is a dict of plain values, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"count": 0, "sums": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            sums = [*self.seen["sums"], float(x.detach().sum())][-3:]
            self.seen = {"count": self.seen["count"] + 1, "sums": sums}
        return x + 0.01 * sum(self.seen["sums"]) / (1 + self.seen["count"])

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Convolved(nn.Module):
    """A convolution whose weights are in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 8, 2)
        self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # incomplete

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.convolution(x.reshape(-1, 2, 2, 2)).flatten(1)
        return found


class Renormed(nn.Module):
    """An embedding of PyTorch's own whose forward pass writes its weights, where they are long."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(6, HIDDEN, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds: torch.Tensor = self.kinds((x.detach()[:, 0] * 50).long().abs() % 6)
        return x + kinds


class Growing(nn.Module):
    """A layer with a memory of the last values, which grows by a row in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: torch.Tensor
        self.register_buffer("memory", torch.zeros(1, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.memory = torch.cat([self.memory, x.detach()[:1]])
        return x + 0.1 * self.memory.mean(0)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}memory" in state:
            self.memory = torch.zeros_like(state[f"{prefix}memory"])
        super()._load_from_state_dict(state, prefix, *rest)


class Recurrent(nn.Module):
    """A recurrent layer, and attention over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, HIDDEN, batch_first=True)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.gru(x.reshape(-1, 2, 4))
        found: torch.Tensor = self.norm(self.attention(out, out, out)[0].sum(1))
        return found


def layers(extra: str) -> nn.Module:
    """Return the layers with a peculiarity, from ``HIDDEN`` values to as many."""
    linear = nn.Linear(HIDDEN, HIDDEN)
    if extra == "spectral_norm":
        return parametrizations.spectral_norm(linear)
    if extra == "old_spectral_norm":
        return nn.utils.spectral_norm(linear)
    if extra == "weight_norm":
        return parametrizations.weight_norm(linear)
    if extra == "column_major":
        linear.weight.data = linear.weight.data.t().contiguous().t()
    made: dict[str, Any] = {
        "dropout": lambda: nn.Dropout(0.3),
        "batch_norm": lambda: nn.BatchNorm1d(HIDDEN),
        "late_buffer": Late,
        "extra_state": Remembering,
        "observed": FakeQuantize,
        "channels_last": Convolved,
        "max_norm": Renormed,
        "growing": Growing,
        "recurrent": Recurrent,
    }
    return made[extra]() if extra in made else linear


class Net(nn.Module):
    """A net of tables and layers, which returns its loss, for TorchRec's pipelines."""

    def __init__(self, program: Program, tables: nn.Module) -> None:
        super().__init__()
        self.embeddings = tables
        self._sequence = program.tables == "sequence"
        self._recomputed = program.extra
        features = features_of(program.tables).values()
        width = DIM if self._sequence else DIM * sum(map(len, features))
        self.first = nn.Linear(width + 2, HIDDEN)
        self.extra = layers(program.extra)
        self.last = nn.Linear(HIDDEN, 1)
        self.beside = nn.Parameter(torch.full((1,), 0.5))
        if program.extra == "tied":
            self.again = self.extra

    def forward(self, batch: ZooBatch) -> tuple[torch.Tensor, torch.Tensor]:
        dense = batch.dense
        if self._recomputed == "tables_checkpointed":
            looked_up = checkpoint(self._look_up, batch.features, dense, use_reentrant=False)
        else:
            looked_up = self._look_up(batch.features, dense)
        hidden = torch.tanh(self.first(torch.cat([dense, looked_up], dim=1)))
        if self._recomputed == "checkpointed":
            hidden = checkpoint(self.extra, hidden, use_reentrant=False)
        else:
            hidden = self.extra(hidden)
        if self._recomputed == "tied":
            hidden = self.again(torch.relu(hidden))
        out = self.last(torch.tanh(hidden)).squeeze(1) * self.beside
        loss = (out - dense.sum(dim=1)).square().mean()
        return loss, out.detach()

    def _look_up(self, features: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        looked_up = self.embeddings(features)
        if isinstance(looked_up, tuple):  # managed collisions return the mapped ids as well
            looked_up = looked_up[0]
        if not self._sequence:
            pooled: torch.Tensor = looked_up.values()
            return pooled.to(dense.dtype)
        sums = torch.stack([each.values().sum(dim=0) for each in looked_up.values()])
        return sums.sum(dim=0).to(dense.dtype).expand(dense.shape[0], -1)


def batch(number: int, tables: str, rank: int = 0) -> ZooBatch:
    """Return a rank's batch of a turn, the same one in each run."""
    draw = torch.Generator().manual_seed(1000 + number + 10_000 * rank)
    dense = torch.randn(SAMPLES, 2, generator=draw)
    lengths, values = [], []
    bounds = IDS
    if tables == "mapped":
        names = [name for of in MAPPED.values() for name in of]
        bounds = dict.fromkeys(names, RAW_IDS)
    for rows in bounds.values():
        each = torch.randint(0, 4, (SAMPLES,), generator=draw)
        if (number + rank) % 7 == 5:
            each *= 0  # an empty batch
        lengths.append(each)
        found = torch.randint(0, rows, (int(each.sum()),), generator=draw)
        often = (found % 10) * 12
        values.append(torch.where(found % 3 > 0, often, found) if tables == "mapped" else found)
    ids, weights = torch.cat(values), None
    if tables in ("weighted", "processed"):
        weights = torch.rand(len(ids), generator=draw) + 0.5
    features = KeyedJaggedTensor(
        keys=list(bounds), values=ids, lengths=torch.cat(lengths), weights=weights
    )
    return ZooBatch(dense, features)
