"""Save, or refuse, tables of FBGEMM's kernels that are in none of TorchRec's collections."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.tracking import track

pytestmark = pytest.mark.usefixtures("group")

ROWS, DIM = 40_000, 8
"""More rows than are compared, should their copies come late."""


class Net(nn.Module):
    """A net whose table FBGEMM updates in the backward pass, without TorchRec."""

    def __init__(self) -> None:
        super().__init__()
        spec = (ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [spec], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.5
        )
        self.table.init_embedding_weights_uniform(-0.1, 0.1)
        self.last = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.table(ids, torch.arange(len(ids) + 1)))
        return found

    def values(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.state_dict().values()]


def test_rows_that_a_backward_pass_updates_while_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, make = threading.Event(), LocalPart.make_late_copies

    def wait_and_make(part: LocalPart) -> None:
        assert go.wait(60)
        make(part)

    monkeypatch.setattr(LocalPart, "make_late_copies", wait_and_make)
    torch.manual_seed(1)
    net = Net()
    with Checkpointer(tmp_path / "root", model=net) as saver:
        saver.steps += 1
        net(torch.arange(0, ROWS, 100)).sum().backward()
        wanted = net.values()
        saver.save(wait=False)
        net(torch.arange(51, ROWS, 100)).sum().backward()
        assert not all(map(torch.equal, net.values(), wanted))
        go.set()
    again = Net()
    with Checkpointer(tmp_path / "root", model=again) as saver:
        saver.restore(required=True)
        assert all(map(torch.equal, again.values(), wanted))


def test_a_bag_that_is_sharded_by_itself_is_refused() -> None:
    model = nn.Module()
    model.bag = nn.EmbeddingBag(30, DIM, mode="sum", include_last_offset=True, device="meta")
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5}
    sharder = EmbeddingBagSharder(fused)
    plan = construct_module_sharding_plan(
        model.bag,
        {"weight": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"bag": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    with pytest.raises(UnsupportedTable, match=r"'bag' is sharded .* EmbeddingBagCollection"):
        track(sharded)


@pytest.mark.parametrize("rate", [0.5, 0.25])
def test_a_rate_that_the_program_sets_is_told(
    rate: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with Checkpointer(tmp_path / "root", model=net) as saver:
        saver.steps += 1
        net.table.set_learning_rate(rate)
        net(torch.arange(3)).sum().backward()
        saver.save()
    told = "values that are in no state dict: model.table.learning_rate_tensor"
    assert (told in caplog.text) == (rate != 0.5)
