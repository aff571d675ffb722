"""Small models with managed collisions: raw ids are mapped to rows, evicted and reassigned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed import references
from tests.distributed.models import CPU
from tests.distributed.states import gather, local_bytes
from tests.distributed.zoo import Net, Zoo, ZooBatch, shard_net
from torchrec_checknrun import Checkpointer, Consecutive, errors
from torchrec_checknrun.dcp import SavePlanner, StorageWriter
from torchrec_checknrun.model.module_tree import find_modules

DIM, SAMPLES = 4, 6
CHUNK_BYTES = 700
Options = dict[str, Any]
"""Fields of a ``Spec``, as JSON."""
RAW_IDS = 240
"""Raw ids are below this: 1 to 6 ranks get equally many."""
ROWS = {"t0": 48, "t1": 24}
"""Chosen so that the rows of 4 ranks make up those of 2."""
FEATURES = {"t0": ["f0", "f1"], "t1": ["f2"]}
MAPS = "embeddings._managed_collision_collection._managed_collision_modules"
POLICIES: dict[str, Any] = {
    "distance_lfu": DistanceLFU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
}


@dataclass
class Spec:
    """The parameters of a model; the defaults suit most tests."""

    bag: bool = True
    hashed: bool = False
    evicts: bool = False
    """True if hashed ids evict others, which only a GPU can do."""
    policy: str = "distance_lfu"
    interval: int = 3
    fused: str = "adagrad"
    raw_ids: int = RAW_IDS
    grown: int = 0
    buckets: int = 4
    apart: bool = False
    """True if the tables are sharded and the maps are not: each rank has its own."""
    suffix: str = ""
    device: str = "cpu"

    @property
    def rows(self) -> dict[str, int]:
        return {table + self.suffix: rows + self.grown for table, rows in ROWS.items()}


class CollisionZoo(Zoo):
    """A model trained on raw ids, some frequent and some unique; evictions draw new weights."""

    device = CPU

    def batch(self, step: int | None = None) -> ZooBatch:
        step = self.steps if step is None else step
        generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
        lengths = torch.randint(0, 4, (3 * SAMPLES,), generator=generator)
        often = torch.randint(0, 12, (int(lengths.sum()),), generator=generator) * 20
        seldom = torch.randint(0, RAW_IDS, often.shape, generator=generator)
        values = torch.where(torch.rand(often.shape, generator=generator) < 0.5, often, seldom)
        features = KeyedJaggedTensor(keys=["f0", "f1", "f2"], values=values, lengths=lengths)
        batch = ZooBatch(torch.randn(SAMPLES, 2, generator=generator), features)
        return batch.to(self.device)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            torch.manual_seed(self.steps * 64 + dist.get_rank())
            super().train()

    @property
    def modules(self) -> dict[str, Any]:
        """Return the managed-collision modules by table."""
        kinds = (MCHManagedCollisionModule, HashZchManagedCollisionModule)
        found = find_modules(self.model, kinds)
        return {path.rpartition(".")[2]: module for path, module in found}

    def mapping(self) -> dict[str, dict[int, int]]:
        """Return the row of each mapped raw id on all ranks, by table."""
        everyone: list[Any] = [None] * dist.get_world_size()
        own = {table: rows_of(module) for table, module in self.modules.items()}
        dist.all_gather_object(everyone, own)
        joined: dict[str, dict[int, int]] = {}
        for of_rank in everyone:
            for table, rows in of_rank.items():
                whole = joined.setdefault(table, {})
                assert not whole.keys() & rows.keys()
                whole.update(rows)
        return joined

    def history(self) -> dict[str, Any]:
        """Return the ids seen by this rank's modules since their last eviction, as JSON."""
        found = {}
        for table, module in self.modules.items():
            count = module._current_history_buffer_offset
            kept: list[Any] = [
                getattr(module, "_history_accumulator", None)
            ]  # made by the first batch
            kept += module._history_metadata.values()
            found[table] = {
                "seen": [[int(value[i]) for value in kept] for i in range(count)],
                "size": module._input_history_buffer_size,
                "since": module._current_iter - module._last_eviction_iter,
            }
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def rows_of(module: Any) -> dict[int, int]:
    if isinstance(module, HashZchManagedCollisionModule):
        start = module._output_segments[module._start_bucket]
        ids = module._hash_zch_identities.flatten().tolist()
        return {raw: start + i for i, raw in enumerate(ids) if raw != -1}
    none = torch.iinfo(torch.int64).max
    pairs = zip(
        module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist(), strict=True
    )
    return {raw: row for raw, row in pairs if raw != none}


def build(spec: Spec, seed: int = 1) -> CollisionZoo:
    """Build a model on all ranks, row-wise, the only sharding of managed collisions."""
    torch.manual_seed(seed)
    sharder: Any = ManagedCollisionEmbeddingCollectionSharder()
    if spec.bag:
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    at = "embeddings"
    if spec.apart:
        sharder, at = EmbeddingBagCollectionSharder(), f"{at}._embedding_module"
    net, collection = net_of(spec, torch.device("meta"))
    plan = dict.fromkeys(spec.rows, "row_wise")
    device = torch.device(spec.device)
    parts = shard_net(net, collection, sharder, plan, spec.fused, device=device, at=at)
    zoo = CollisionZoo(*parts, "collisions")
    zoo.device = device
    return zoo


def net_of(spec: Spec, device: torch.device) -> tuple[Net, Any]:
    """Build a model that is not sharded; also return its embedding collection."""
    tables: list[Any] = []
    for (table, rows), features in zip(spec.rows.items(), FEATURES.values(), strict=True):
        common: dict[str, Any] = {"name": table, "num_embeddings": rows, "embedding_dim": DIM}
        if spec.bag:
            config: Any = EmbeddingBagConfig(
                **common, feature_names=features, pooling=PoolingType.SUM
            )
        else:
            config = EmbeddingConfig(**common, feature_names=features)
        tables.append(config)
    modules = ManagedCollisionCollection(
        {table: _module(spec, table) for table in spec.rows}, tables
    )
    if spec.bag:
        collection: Any = EmbeddingBagCollection(tables=tables, device=device)
        managed: Any = ManagedCollisionEmbeddingBagCollection(
            collection, modules, allow_in_place_embed_weight_update=True
        )
    else:
        collection = EmbeddingCollection(tables=tables, device=device)
        managed = ManagedCollisionEmbeddingCollection(
            collection, modules, allow_in_place_embed_weight_update=True
        )
    return Net(managed, DIM * 3 if spec.bag else DIM, not spec.bag), collection


def _module(spec: Spec, table: str) -> Any:
    if spec.hashed:
        return HashZchManagedCollisionModule(
            zch_size=spec.rows[table],
            device=CPU,
            total_num_buckets=spec.buckets,
            input_hash_size=spec.raw_ids,
            max_probe=4,
            eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION if spec.evicts else None,
            eviction_config=HashZchEvictionConfig(features=["any"], single_ttl=1),
        )
    return MCHManagedCollisionModule(
        zch_size=spec.rows[table],
        device=CPU,
        eviction_policy=POLICIES[spec.policy](),
        eviction_interval=spec.interval,
        input_hash_size=spec.raw_ids,
    )


def fill(zoo: CollisionZoo, seed: int) -> None:
    """Put ids into their slots as a GPU does: that kernel doesn't run on a CPU."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for module in zoo.modules.values():
        block = -(-module.input_size() // module.buckets())
        per_bucket = module.output_size() * ranks // module.buckets()
        for bucket in range(module._start_bucket, module._end_bucket):
            start = (bucket - rank * module.buckets() // ranks) * per_bucket
            ids = bucket * block + torch.randperm(block, generator=generator)[: per_bucket // 2]
            slots = torch.randperm(per_bucket, generator=generator)[: len(ids)]
            module._hash_zch_identities.data[start + slots] = ids[:, None]
        if module._hash_zch_metadata is not None:
            module._hash_zch_metadata.random_(1000, generator=generator)


@contextmanager
def resets_on_cpu() -> Iterator[None]:
    """Reset rows of row-wise Adagrad on a CPU as FBGEMM does on a GPU only."""

    def reset(
        self: Any,
        pruned_indices: torch.Tensor,
        pruned_indices_offsets: torch.Tensor,
        logical_table_ids: torch.Tensor,
        buffer_ids: torch.Tensor,
    ) -> None:
        for feature, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            start, stop = pruned_indices_offsets[buffer : buffer + 2].tolist()
            table = self.feature_table_map[feature]
            weight, (momentum, *_) = (
                self.split_embedding_weights()[table],
                self.split_optimizer_states()[table],
            )
            rows = pruned_indices[start:stop]
            rows = rows[rows < len(weight)]  # other rows would land in the next table's memory
            weight.data[rows] = 0
            momentum.data[rows] = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", reset
        )
        yield


def checkpointer(root: str, zoo: CollisionZoo) -> Checkpointer:
    return Checkpointer(
        root,
        model=zoo.model,
        retention=None,
        state={"optimizer": zoo.optimizer, "zoo": zoo},
        policy=Consecutive(),
        chunk_bytes=CHUNK_BYTES,
    )


def on_device(spec: Spec) -> Any:
    alone = spec.device == "cpu" and spec.fused == "rowwise_adagrad"
    return resets_on_cpu() if alone else nullcontext()


def keep(zoo: CollisionZoo, path: Path) -> None:
    """Copy a run's whole state, each rank's history to a separate file."""
    rank, state, mapping = dist.get_rank(), gather(zoo), zoo.mapping()
    path.with_suffix(f".{rank}.json").write_text(json.dumps(zoo.history()))
    if rank == 0:
        references.store(path.with_suffix(".npz"), state)
        path.with_suffix(".json").write_text(json.dumps(mapping))
    dist.barrier()


def saved(root: str, spec: Options, tracked: bool = True) -> str:
    """Save one checkpoint and a copy, with ids seen since the last eviction."""
    zoo = build(Spec(**spec))
    zoo.train(4)
    if not tracked:
        dcp.save(
            {"model": zoo.model, "optimizer": zoo.optimizer, "zoo": zoo},
            planner=SavePlanner(),
            storage_writer=StorageWriter(Path(root) / "root" / "untracked"),
        )
        keep(zoo, Path(root) / "untracked")
        return "untracked"
    with checkpointer(f"{root}/root", zoo) as saver:
        zoo.train(4)
        report = saver.save()
        assert report is not None
    keep(zoo, Path(root) / report.id)
    return report.id


def refused(
    root: str,
    spec: Options,
    name: str,
    match: str,
    error: str = "IncompatibleCheckpoint",
    **how: Any,
) -> None:
    """Assert that a restore raises on all ranks and changes nothing."""
    zoo = build(Spec(**spec), seed=7)
    zoo.train(2)
    before, history = local_bytes(zoo), zoo.history()
    with checkpointer(f"{root}/root", zoo) as saver:
        with pytest.raises(getattr(errors, error), match=match):
            saver.restore(name, **how)
        assert (local_bytes(zoo), zoo.history(), zoo.steps) == (before, history, 2)
        zoo.train(2)
        saver.save()
