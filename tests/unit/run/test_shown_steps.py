"""Save fused optimizers whose state dict shows the kernel's step, a value for each shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    WeightDecayMode,
)

from tests.unit.tracked_model import TALL, make_model, table, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.tracking import track

pytestmark = pytest.mark.usefixtures("group")

FUSED = {
    "weight_decay": 0.01,
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode.ADAGRADW, counter_halflife=9
    ),
}


def steps_of(model: Any) -> set[int]:
    state = model.fused_optimizer.state_dict()["state"]
    shown = [v for of in state.values() for name, v in of.items() if name.endswith(".iter")]
    assert len(shown) == 3
    return {int(s.tensor.item()) for value in shown for s in value.local_shards()}


def content(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


@pytest.mark.parametrize("tracked", [True, False])
def test_by_dcp(tracked: bool, tmp_path: Path) -> None:
    model: Any = make_model(fused=FUSED)
    writer = track(model) if tracked else None
    for ids in ([3, 4], [4, 5]):
        train(model, a=[ids], b=[ids])
    planner = SavePlanner(writer) if writer is not None else SavePlanner()
    dcp.save(content(model), planner=planner, storage_writer=StorageWriter(tmp_path / "one"))
    again: Any = make_model(fused=FUSED)
    reader = track(again) if tracked else None
    dcp.load(
        content(again), planner=LoadPlanner(reader), storage_reader=StorageReader(tmp_path / "one")
    )
    assert steps_of(model) == steps_of(again) == {2}
    for each in (model, again):
        train(each, b=[[4, 7]])
    assert torch.equal(table(model, TALL), table(again, TALL))
    for each in (writer, reader):
        if each is not None:
            each.close()


class Trainer:
    """A state object that hands on to the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def test_by_an_object_that_hands_on(tmp_path: Path) -> None:
    model: Any = make_model(fused=FUSED)
    train(model, a=[[3, 4]], b=[[5, 6]])
    state = {"trainer": Trainer(model.fused_optimizer)}
    with Checkpointer(tmp_path / "root", model=model, state=state) as saver:
        saver.steps += 1
        saver.save()
    again: Any = make_model(fused=FUSED)
    state = {"trainer": Trainer(again.fused_optimizer)}
    with Checkpointer(tmp_path / "root", model=again, state=state) as saver:
        saver.restore(required=True)
    assert steps_of(again) == steps_of(model) == {1}
    assert torch.equal(table(model, TALL), table(again, TALL))
