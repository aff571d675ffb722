"""Models that TorchRec shards for serving within a process: followed shard by shard, or refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensorBase
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.mc_modules import InferManagedCollisionCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.types import ShardingType
from torchrec.inference.modules import quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    ManagedCollisionCollection,
)
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingCollection,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.examples import some_of
from tests.unit.serve.served import (
    CPU,
    TYPES,
    Job,
    Net,
    every_row,
    follows,
    mapping,
    quantized,
    restored,
)
from torchrec_checknrun import Follower, Quantization
from torchrec_checknrun.errors import UnsupportedTable

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path, quantization=Quantization(bits=4, exact_below_rows=0))
    job.train(0)
    job.save()
    return job


@pytest.mark.parametrize("bits", some_of([8, 4, 2], 1))
def test_sharded(tmp_path: Path, job: Job, bits: int) -> None:
    set_propogate_device(True)
    plain = quantized(Net(sequence=False), bits)
    model, _ = shard_quant_model(plain, compute_device="cpu", sharding_device="cpu")
    follower = Follower(tmp_path, model)
    follows(job, tmp_path, follower, bits)
    for module in follower._copies.replica.tables.values():
        assert module.form.stride == module.form.width  # rows are not aligned there


def on_two(kind: ShardingType, tables: tuple[str, ...], plain: Any = None) -> Any:
    """Shard a model for two devices, which are both this process's CPU."""
    set_propogate_device(True)
    wanted = ParameterConstraints(
        sharding_types=[kind.value], compute_kernels=["quant"], min_partition=8
    )
    model, _ = shard_quant_model(
        quantized(Net(sequence=False), 8) if plain is None else plain,
        world_size=2,
        compute_device="cpu",
        sharding_device="cpu",
        constraints=dict.fromkeys(tables, wanted),
    )
    return model


def in_columns(net: Net, bits: int) -> Any:
    """Quantize a model, and shard two tables by columns, with the values that it has."""
    net.ec = None
    bags = [type(net.ebc)]
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(net, bags)
    plain = quantize_inference_model(net.eval(), quantization_dtype=TYPES[bits])
    saved = {name: value.clone() for name, value in plain.state_dict().items() if "bags" in name}
    model = on_two(ShardingType.COLUMN_WISE, ("mean", "tall"), plain)
    for name, value in model.state_dict().items():
        if isinstance(value, list):  # scales, or biases: each shard of columns has those of the row
            for own in value:
                own.copy_(saved[name])
        elif isinstance(value, ShardedTensorBase):
            for shard in value.local_shards():
                (row, col), (rows, cols) = shard.metadata.shard_offsets, shard.tensor.shape
                shard.tensor.copy_(saved[name][row : row + rows, col : col + cols])
        elif name in saved:
            value.copy_(saved[name])
    return model


@pytest.mark.parametrize(("bits", "copies"), some_of(product([8, 4, 2], [1, 2]), 0, 3))
def test_sharded_by_columns(tmp_path: Path, job: Job, bits: int, copies: int) -> None:
    """Each shard has its columns' codes, with scale and bias of the whole row."""
    follower = Follower(tmp_path, in_columns(Net(), bits), copies=copies)
    tables = follower._copies.replica.tables
    assert [part.columns for part in tables["ebc.tall"].parts] == [(0, 8), (8, 16)]
    for seed in (1, 2):
        version = follower.poll()
        assert version is not None
        assert version.error is None
        net = restored(tmp_path)
        unsharded, wanted = quantized(net, bits).ebc, in_columns(net, bits)
        with follower.read() as (model, _), torch.no_grad():
            served: Any = model
            pairs = zip(served.ebc._tbes_configs, wanted.ebc._tbes_configs, strict=True)
            assert all(torch.equal(own.weights_host, other.weights_host) for own, other in pairs)
            assert torch.equal(served(every_row()), wanted(every_row()))
            answers = unsharded(every_row()).to_dict()
            found = served.ebc(every_row()).to_dict()  # in another order
            assert all(torch.equal(found[name], answer) for name, answer in answers.items())
        job.train(seed)
        job.save()


def test_bytes_taken_for_columns_are_refused(tmp_path: Path) -> None:
    """TorchRec's planner takes a row's bytes, scale and padding included, for its columns: such a
    model can't predict.
    """
    model = on_two(ShardingType.COLUMN_WISE, ("mean", "tall"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(every_row())
    with pytest.raises(UnsupportedTable, match=r"'ebc\.mean' of 16 columns .*\(24, 32\)"):
        Follower(tmp_path, model)


def test_sharded_by_rows(tmp_path: Path, job: Job) -> None:
    model = on_two(ShardingType.ROW_WISE, ("wide", "mean", "tall"))
    follower = Follower(tmp_path, model)
    parts = [len(table.parts) for table in follower._copies.replica.tables.values()]
    assert parts == [2, 2, 2]
    follows(job, tmp_path, follower, 8)


def mapped_in_shards(world_size: int) -> nn.Module:
    """Quantize and shard a collection whose ids are mapped to rows, as TorchRec does."""
    tables = [EmbeddingConfig(name="t", num_embeddings=16, embedding_dim=8, feature_names=["a"])]
    module = mapping(16)
    model = nn.Module()
    model.mc = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables, device=CPU), ManagedCollisionCollection({"t": module}, tables)
    )
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
        model, [EmbeddingCollection, ManagedCollisionEmbeddingCollection]
    )
    kinds = {
        torch.typename(
            ManagedCollisionEmbeddingCollection
        ): QuantManagedCollisionEmbeddingCollection
    }
    set_propogate_device(True)
    found, _ = shard_quant_model(
        quantize_inference_model(model.eval(), quantization_mapping=kinds),
        world_size=world_size,
        compute_device="cpu",
        sharding_device="cpu",
        sharders=[
            QuantManagedCollisionEmbeddingCollectionSharder(
                QuantEmbeddingCollectionSharder(), InferManagedCollisionCollectionSharder()
            )
        ],
        constraints={
            "t": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["quant"])
        },
    )
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_maps_in_shards_are_refused(tmp_path: Path, world_size: int) -> None:
    """TorchRec deals ids to shards by value and number of shards, and gives them neither the map
    nor the rows of the model that was quantized.
    """
    model: Any = mapped_in_shards(world_size)
    features = KeyedJaggedTensor(["a"], torch.tensor([5, 900, 33]), lengths=torch.tensor([1, 2]))
    answers, _ = model.mc(features)
    assert not answers["a"].values().any()
    with pytest.raises(UnsupportedTable, match=r"mc .*is sharded: .*Serve a model that is not"):
        Follower(tmp_path, model, strict=False)
