"""Encode an optimizer at every step as it is then, whatever was changed or replaced since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import Adam, Optimizer

from tests.unit.memory.pieces import joined
from tests.unit.optimizer_changes import (
    CHANGES,
    LAST,
    MAKES,
    Counting,
    Model,
    set_a_rate,
)
from torchrec_checknrun.dense.optimizer import DenseOptimizer
from torchrec_checknrun.memory.held_states import HeldStates, Taker
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.values.state import decode_state

NAME = "optimizer"


def taken(taker: Taker) -> tuple[object, bytes]:
    """Return the optimizer's tree and payload, as an image would hold them."""
    content = memoryview(joined(taker.take()))
    tree, payload = HeldStates.read(content).trees[NAME]
    return tree, bytes(payload)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_content_is_the_present_one(
    small_model: tuple[Model, TrackedModel],
    make: Callable[[Model], Optimizer],
    change: Callable[[Model, Optimizer], None],
) -> None:
    module, tracked = small_model
    optimizer = make(module)
    taker = Taker(module, tracked, {NAME: optimizer})
    taken(taker)
    for _ in range(2):
        module.step(optimizer)
        taken(taker)
    change(module, optimizer)
    for _ in range(2):
        assert fields(taken(taker)) == fields(asked(module, tracked, optimizer))
        if change not in LAST:
            module.step(optimizer)


def asked(module: Model, tracked: TrackedModel, optimizer: Optimizer) -> tuple[object, bytes]:
    """Return the same of an optimizer that is asked each time."""
    taker = Taker(module, tracked, {NAME: optimizer})
    taker._kept[NAME]._steady._nest = []
    return taken(taker)


def fields(found: tuple[object, bytes]) -> object:
    """Decode a tree, whose payload may hold other states as well."""
    tree, payload = found
    return repr(decode_state(tree, payload))  # type: ignore[arg-type]  # a tree


@pytest.mark.parametrize("make", MAKES)
def test_nothing_is_asked_as_long_as_nothing_is_replaced(
    small_model: tuple[Model, TrackedModel],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Model], Optimizer],
) -> None:
    module, tracked = small_model
    optimizer = make(module)
    taker = Taker(module, tracked, {NAME: optimizer})
    for _ in range(2):
        module.step(optimizer)
        taken(taker)
    calls: list[object] = []

    def stored(optimizer: DenseOptimizer) -> dict[str, Any]:
        calls.append(optimizer)
        return {}

    monkeypatch.setattr(DenseOptimizer, "stored", stored)
    before = taken(taker)
    module.step(optimizer)
    set_a_rate(module, optimizer)
    assert taken(taker) != before
    assert not calls


def test_other_optimizers_are_asked_each_time(small_model: tuple[Model, TrackedModel]) -> None:
    module, tracked = small_model
    optimizer = Counting(module.parameters())
    taker = Taker(module, tracked, {NAME: optimizer})
    module.step(optimizer)
    taken(taker)
    optimizer.inside.param_groups[0]["lr"] = 0.5
    assert "0.5" in str(fields(taken(taker)))
    hooked = Adam(module.parameters())
    taker = Taker(module, tracked, {NAME: hooked})
    module.step(hooked)
    taken(taker)
    hooked.register_state_dict_post_hook(lambda _self, found: {**found, "note": {"from": "a hook"}})
    assert "a hook" in str(fields(taken(taker)))
