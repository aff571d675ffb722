"""Kinds of models that can be followed, and what is refused by name."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    ManagedCollisionCollection,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.examples import some_of
from tests.scripting import SCRIPTS
from tests.unit.serve.served import (
    CPU,
    ROWS,
    TYPES,
    Job,
    Net,
    batch,
    differences,
    follows,
    kernels,
    mapping,
    quantized,
    restored,
)
from torchrec_checknrun import Checkpointer, Consecutive, Follower, Quantization
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedTable

pytestmark = pytest.mark.usefixtures("one_rank")
LEAVES = ["IntNBitTableBatchedEmbeddingBagsCodegen", "ComputeKJTToJTDict"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path, quantization=Quantization(bits=4, exact_below_rows=0))
    job.train(0)
    job.save()
    return job


def scripted(bits: int) -> torch.jit.ScriptModule:
    """Script a model as TorchRec's examples do; sequence collections can't be scripted."""
    plain = quantized(Net(sequence=False), bits)
    traced = torchrec.fx.symbolic_trace(plain, leaf_modules=LEAVES)
    return torch.jit.script(traced)


def loaded(bits: int) -> torch.jit.ScriptModule:
    return reloaded(scripted(bits))


def reloaded(model: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    return torch.jit.load(file)


@SCRIPTS
@pytest.mark.parametrize(
    ("copies", "make", "bits"), some_of(product([1, 2], [scripted, loaded], [8, 4, 2]), 1, 9)
)
def test_scripted(tmp_path: Path, job: Job, make: object, bits: int, copies: int) -> None:
    assert callable(make)
    follower = Follower(tmp_path, make(bits), copies=copies)
    follows(job, tmp_path, follower, bits)


@SCRIPTS
@pytest.mark.parametrize(
    ("freeze", "copies"),
    some_of(product([torch.jit.freeze, torch.jit.optimize_for_inference], [1, 2]), 1),
)
def test_frozen_is_refused(tmp_path: Path, freeze: Any, copies: int) -> None:
    frozen = freeze(scripted(8).eval())
    for model in (frozen, reloaded(frozen)):
        with pytest.raises(UnsupportedTable, match=r"the model is frozen \(torch\.jit\.freeze"):
            Follower(tmp_path, model, copies=copies)


def test_tables_in_unified_memory_are_refused(tmp_path: Path) -> None:
    model = quantized(Net(sequence=False), 8)
    kernel = kernels(model)[0]
    kernel.weights_uvm, kernel.weights_host = kernel.weights_host, torch.empty(0).byte()
    with pytest.raises(UnsupportedTable, match=r"'ebc\.wide': its kernel keeps rows in .* a cache"):
        Follower(tmp_path, model)


def test_types_by_table(tmp_path: Path, job: Job) -> None:
    types = {"mean": torch.quint4x2, "tall": torch.quint2x4}
    follower = Follower(
        tmp_path,
        quantize_inference_model(
            Net(), quantization_dtype=torch.qint8, per_table_weight_dtype=types
        ),
    )
    follower.poll()
    wanted = quantize_inference_model(
        restored(tmp_path), quantization_dtype=torch.qint8, per_table_weight_dtype=types
    )
    assert differences(follower, wanted) == []
    forms = {str(table.form) for table in follower._copies.replica.tables.values()}
    assert forms == {"int8", "int4", "int2"}


def test_a_part_of_the_trained_model(tmp_path: Path, job: Job) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    # The trained model is the part here: names have a prefix that the checkpoint's lack.
    with pytest.raises(IncompatibleCheckpoint, match="map="):
        Follower(tmp_path, Outer()).poll()
    names = {
        "ebc.embedding_bags.wide": "net.ebc.embedding_bags.wide",
        "ebc.embedding_bags.mean": "net.ebc.embedding_bags.mean",
        "ebc.embedding_bags.tall": "net.ebc.embedding_bags.tall",
        "ec.embeddings.wide": "net.ec.embeddings.wide",
        **{name: f"net.{name}" for name in ("over.weight", "over.bias", "seen")},
    }
    outer = Outer()
    follower = Follower(tmp_path, outer, map=names)
    follower.poll()
    with follower.read() as (model, _):
        net = model.get_submodule("net")
        assert torch.equal(net(batch(1)), restored(tmp_path)(batch(1)))


def test_what_only_the_model_has(tmp_path: Path, job: Job) -> None:
    net = quantized(Net(), 8)
    net.register_buffer("calibration", torch.ones(2))
    with pytest.raises(IncompatibleCheckpoint, match="'calibration'"):
        Follower(tmp_path, net).poll()
    follower = Follower(tmp_path, net, strict=False)
    version = follower.poll()
    assert version is not None
    assert version.kept == ("'calibration'",)


def test_another_size(tmp_path: Path, job: Job) -> None:
    net = Net()
    net.over = nn.Linear(40, 2)
    with pytest.raises(IncompatibleCheckpoint, match=r"over.weight.*\[2, 40\]"):
        Follower(tmp_path, net).poll()


def pruned(net: Net, rows: int) -> Any:
    """Quantize a model whose table ``tall`` has only its first rows."""
    setattr(net.ebc, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {"tall": rows})
    return quantize_inference_model(net, quantization_dtype=TYPES[8])


def test_a_pruned_table(tmp_path: Path, job: Job) -> None:
    follower = Follower(tmp_path, pruned(Net(), 25))
    follower.poll()
    wanted = pruned(restored(tmp_path), 25)
    with follower.read() as (model, _):
        for own, other in zip(kernels(model), kernels(wanted), strict=True):
            assert torch.equal(own.weights_host, other.weights_host)


def remapping(rows: int) -> torch.Tensor:
    """Map every second row to a row in memory, in the other direction, and prune the others."""
    ids = torch.arange(ROWS)
    return torch.where(ids % 2 == 0, rows - 1 - ids // 2, -1).int()


def test_a_remapped_table(tmp_path: Path, job: Job) -> None:
    half = ROWS // 2
    model = pruned(Net(), half)
    kernel = model.ebc._emb_modules[0]
    assert kernel.feature_names == ["wide", "tall"]
    kernel.set_index_remappings_array([None, remapping(half)])
    follower = Follower(tmp_path, model)
    for seed in (1, 2):
        follower.poll()
        wide = quantized(restored(tmp_path), 8).ebc._emb_modules[0].split_embedding_weights(False)
        with follower.read() as (served, _):
            rows = kernels(served)[0].split_embedding_weights(False)[1][0]
            kept = [row for row in range(ROWS) if row % 2 == 0]
            assert torch.equal(rows[remapping(half)[kept].long()], wide[1][0][kept])
        job.train(seed)
        job.save()


def test_a_hashed_table_is_refused(tmp_path: Path) -> None:
    model = pruned(Net(), ROWS // 2)
    model.ebc._emb_modules[0].set_index_remappings(
        [torch.arange(ROWS).int(), remapping(ROWS // 2)], use_array_for_index_remapping=False
    )
    with pytest.raises(UnsupportedTable, match=r"ebc\.(wide|tall).*hash table"):
        Follower(tmp_path, model)


def mapped(**options: Any) -> nn.Module:
    """Build a collection whose ids are mapped to rows."""
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["a"])]
    module = mapping(10, **options)
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables, device=CPU),
        ManagedCollisionCollection({"t": module}, tables),
    )


def test_a_map_that_predictions_would_change(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTable, match=r"_managed_collision_modules\.t .*model\.eval"):
        Follower(tmp_path, mapped())
    Follower(tmp_path, mapped().eval())


def test_a_part_of_a_map(tmp_path: Path) -> None:
    model = mapped(output_global_offset=10, output_segments=[0, 10, 20]).eval()
    with pytest.raises(UnsupportedTable, match=r"modules\.t .*a part of its map"):
        Follower(tmp_path, model)


def test_a_trained_model_is_refused(tmp_path: Path, job: Job) -> None:
    with pytest.raises(UnsupportedTable, match="sharded for training"):
        Follower(tmp_path, job.model)


def test_arguments(tmp_path: Path) -> None:
    for options in ({"copies": 3}, {"interval_seconds": 0}, {"memory_bytes": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Follower(tmp_path, Net(), **options)
    with pytest.raises(ValueError, match="interval_seconds=1"):
        Follower(tmp_path, Net()).start()


class Weighted(nn.Module):
    """A model with weights by position, whose training and inference names differ."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["a"]
        )
        self.sparse = nn.Module()
        self.sparse.fp = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection([table], device=device, is_weighted=True),
            PositionWeightedModuleCollection({"a": 4}, device=CPU),
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        processed: Any = self.sparse.fp
        answer: torch.Tensor = processed(features).values()
        return answer


def test_feature_processors(tmp_path: Path) -> None:
    model = Weighted(torch.device("meta"))
    fp: Any = model.sparse.fp
    bags = fp._embedding_bag_collection
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.5})
    sharder = FeatureProcessedEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        fp, {"t": row_wise()}, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    dmp = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"sparse.fp": plan}), sharders=[sharder]
    )
    features = KeyedJaggedTensor(["a"], torch.arange(12) % ROWS, lengths=torch.full((3,), 4))
    with Checkpointer(tmp_path, model=dmp, policy=Consecutive()) as saver:
        follower = Follower(tmp_path, quantize_inference_model(Weighted()))
        for step in range(2):
            dmp(features).sum().backward()
            with torch.no_grad():
                for name, weight in dmp.named_parameters():
                    if "position_weight" in name:
                        weight.add_(0.5 + step)
            saver.step()
            saver.save()
            saver.wait()
            assert follower.poll() is not None
            plain = Weighted()
            for name, value in dmp.state_dict().items():
                into = plain.state_dict()[name]
                local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
                into.copy_(local)
            with follower.read() as (served, _), torch.no_grad():
                assert torch.equal(served(features), quantize_inference_model(plain)(features))
