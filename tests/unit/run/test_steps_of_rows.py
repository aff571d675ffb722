"""Restore the steps at which rows were last updated exactly, however optimizer state is stored.

FBGEMM's regularization by counters decays a row's counter by the steps since then: from 1,000,000
on, rounding as for sums of squares would be thousands of steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from torch import nn

from tests.unit.tracked_model import make_model, train
from torchrec_checknrun import Checkpointer, Consecutive, Quantization
from torchrec_checknrun.model.kernels import find_kernels

pytestmark = pytest.mark.usefixtures("group")

FUSED = {
    "weight_decay": 0.01,
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(counter_halflife=9),
}
STEPS = 0, 998, 345_678, 999_998, 1_000_001


def states_of(model: nn.Module, name: str) -> list[torch.Tensor]:
    kernels, _ = find_kernels(model)
    return [shard.optimizer[name].clone() for kernel in kernels for shard in kernel.shards]


@pytest.mark.parametrize(
    "quantization",
    [
        Quantization(optimizer="bf16"),
        Quantization(optimizer="log8"),
        Quantization(optimizer="rowlog8"),
        Quantization(method="delta", step=2.0**-10, optimizer="logdelta", exact_below_rows=0),
    ],
    ids=lambda quantization: quantization.optimizer,
)
def test_steps_are_exact(quantization: Quantization, tmp_path: Path) -> None:
    model = make_model(fused=FUSED)
    with Checkpointer(
        tmp_path / "root", model=model, quantization=quantization, policy=Consecutive()
    ) as saver:
        for number, step in enumerate(STEPS):
            for kernel in find_kernels(model)[0]:
                kernel.module._emb_module.iter.fill_(step)
                kernel.module._emb_module.iter_cpu.fill_(step)
            train(model, a=[[0, number]], shared=[[number, 9 + number]])
            saver.steps += 1
            if number > 2:
                saver.save()
    again = make_model(fused=FUSED)
    with Checkpointer(
        tmp_path / "root", model=again, quantization=quantization, policy=Consecutive()
    ) as saver:
        saver.restore(required=True)
    steps = states_of(model, "prev_iter")
    assert {step + 1.0 for step in STEPS} <= set(torch.cat(steps).tolist())
    assert all(map(torch.equal, states_of(again, "prev_iter"), steps))
