"""Follow with models whose names share memory, or whose state dict shows copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.unit.serve.served import CPU, ROWS, Job, Net, batch, restored
from torchrec_checknrun import Checkpointer, Follower
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedTable

pytestmark = pytest.mark.usefixtures("one_rank")


class Tied(nn.Module):
    """A model that scores all rows of its table, by the table's own weight, and ties two layers."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["a"]
        )
        self.ebc = EmbeddingBagCollection([table], device=CPU)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.scores = nn.Linear(8, ROWS, bias=False)
        if tied:
            self.scores.weight = self.ebc.embedding_bags["t"].weight

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        answer: torch.Tensor = self.scores(self.two(self.one(self.ebc(features).values())))
        return answer


@pytest.mark.parametrize("copies", [1, 2])
def test_a_layer_tied_to_a_table_is_refused(tmp_path: Path, copies: int) -> None:
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    net, sharder = Tied(), EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        net.ebc, {"t": row_wise(compute_kernel="fused")}, sharder, 1, 1, "cpu"
    )
    dmp = DistributedModelParallel(  # which unties the two
        net, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    optimizer = torch.optim.SGD(dmp.module.parameters(), lr=0.1)
    features = KeyedJaggedTensor(["a"], torch.arange(12) % ROWS, lengths=torch.full((3,), 4))
    with Checkpointer(tmp_path, model=dmp, state={"optimizer": optimizer}) as saver:
        dmp(features).sum().backward()
        optimizer.step()
        saver.step()
        saver.save()
        saver.wait()
        with pytest.raises(IncompatibleCheckpoint, match=r"'ebc.*t'.*'scores\.weight'.*untie"):
            Follower(tmp_path, Tied(), copies=copies).poll()
        follower = Follower(tmp_path, Tied(tied=False), copies=copies)
        assert follower.poll() is not None
        with follower.read() as (model, _), torch.no_grad():
            assert torch.equal(model(features), dmp(features))


@pytest.mark.parametrize("copies", [1, 2])
def test_tables_that_share_memory_are_refused(tmp_path: Path, copies: int) -> None:
    job = Job(tmp_path)
    job.train(0)
    job.save()
    net = Net()
    assert net.ec is not None
    net.ec.embeddings["wide"].weight = net.ebc.embedding_bags["wide"].weight
    with pytest.raises(IncompatibleCheckpoint, match=r"wide'.*wide'.*untie"):
        Follower(tmp_path, net, copies=copies).poll()
    job.saver.close()


@pytest.mark.parametrize("copies", [1, 2])
def test_a_state_dict_of_copies_is_refused(tmp_path: Path, copies: int) -> None:
    job = Job(tmp_path)
    job.train(0)
    job.save()
    net = Net()
    hook = net.over.register_state_dict_post_hook(
        lambda _, found, prefix, __: found.update({f"{prefix}bias": found[f"{prefix}bias"].clone()})
    )
    with pytest.raises(UnsupportedTable, match=r"'over\.bias'.*copy"):
        Follower(tmp_path, net, copies=copies)
    hook.remove()
    follower = Follower(tmp_path, net, copies=copies)
    follower.poll()
    wanted = restored(tmp_path)(batch(1))
    with follower.read() as (model, _):
        assert torch.equal(model(batch(1)), wanted)
    job.saver.close()
