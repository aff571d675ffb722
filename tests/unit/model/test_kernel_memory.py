"""Follow a fused kernel's memory when it moves; keep the views of it while it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.tracked_model import make_model
from torchrec_checknrun.model.kernels import Kernel, find_kernels
from torchrec_checknrun.tracking import Consumer, track

pytestmark = pytest.mark.usefixtures("one_rank")


def move_weights(tbe: Any) -> None:
    """Give the tables other memory, as ``model.to`` does, and other values."""
    tbe.weights_host.data = tbe.weights_host.data + 1.0


def exchange_weights(tbe: Any) -> None:
    tbe.weights_host = nn.Parameter(tbe.weights_host.detach() + 1.0)


def move_states(tbe: Any) -> None:
    tbe.momentum1_host.data = tbe.momentum1_host.data + 1.0


def exchange_states(tbe: Any) -> None:
    tbe.momentum1_host = nn.Parameter(tbe.momentum1_host.detach() + 1.0)


def write(tbe: Any) -> None:
    with torch.no_grad():
        tbe.weights_host.add_(1.0)


CHANGES = [move_weights, exchange_weights, move_states, exchange_states, write]


def contents(kernel: Kernel) -> list[torch.Tensor]:
    """Return copies of what the kernel itself shows now."""
    tbe = kernel.module._emb_module
    states = [state for of_table in tbe.split_optimizer_states() for state in of_table]
    return [tensor.clone() for tensor in (*tbe.split_embedding_weights(), *states)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("times", [1, 2])
def test_shards_follow_the_memory(change: Callable[[Any], None], times: int) -> None:
    model = make_model()
    tracked = track(model)
    tracked.flush()
    for _ in range(times):
        tracked.clear(Consumer.LAST)
        for kernel in find_kernels(model)[0]:
            change(kernel.module._emb_module)
        tracked.flush()
        assert all(bool((s.marks.live & int(Consumer.LAST)).all()) for s in tracked.shards)
        for hook, shards in tracked._hooks.items():
            found = [s.local.weight for s in shards]
            found += [state for s in shards for state in s.local.optimizer.values()]
            wanted = contents(hook.kernel)
            assert all(map(torch.equal, found, wanted))
            assert len(found) == len(wanted)
    tracked.close()


def test_views_are_kept_while_the_memory_stays() -> None:
    tracked = track(make_model())
    (kernel, *_) = tracked._kernels()
    memory = kernel.memory()
    write(kernel.module._emb_module)
    tracked.flush()
    assert kernel.memory() is memory
    move_weights(kernel.module._emb_module)
    assert kernel.memory() is not memory
    tracked.close()
