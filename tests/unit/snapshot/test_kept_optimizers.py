"""Take an optimizer's state at every cut as it is then, whatever was changed since the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import Optimizer

from tests.unit.optimizer_changes import (
    CHANGES,
    LAST,
    MAKES,
    Model,
    plain,
    set_a_rate,
)
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.dense.optimizer import DenseOptimizer
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.snapshot.items import ChunkItem, Items
from torchrec_checknrun.snapshot.snapshot import Declared, take_states
from torchrec_checknrun.values.state import decode_state

NAME = "optimizer"


def stored(module: Model, tracked: TrackedModel, declared: Declared) -> object:
    """Return what a checkpoint would hold of the optimizer, decoded; or the error's text."""
    try:
        snapshot = take_states(module, tracked, declared)
        items = Items.of(snapshot, Quantization(), 1 << 20)
    except Exception as error:
        return repr(error)
    item = items.by_name[f"state:{NAME}"]
    assert isinstance(item, ChunkItem)
    payload = b"".join(map(bytes, item.chunk.pieces))
    found: Any = decode_state(items.trees[NAME], payload)
    return repr(found), repr(snapshot.states[NAME]), sorted(snapshot.stepped)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_content_is_the_present_one(
    small_model: tuple[Model, TrackedModel],
    make: Callable[[Model], Optimizer],
    change: Callable[[Model, Optimizer], None],
) -> None:
    module, tracked = small_model
    optimizer: Any = make(module)
    declared = Declared({NAME: optimizer}).watching(module)
    for _ in range(3):
        stored(module, tracked, declared)
        module.step(optimizer)
    stored(module, tracked, declared)
    change(module, optimizer)
    for _ in range(2):
        wanted = stored(module, tracked, Declared({NAME: optimizer}))
        assert stored(module, tracked, declared) == wanted
        if change not in LAST:
            module.step(optimizer)


@pytest.mark.parametrize("make", MAKES)
def test_nothing_is_asked_as_long_as_nothing_is_replaced(
    small_model: tuple[Model, TrackedModel],
    make: Callable[[Model], Optimizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, tracked = small_model
    optimizer: Any = make(module)
    declared = Declared({NAME: optimizer}).watching(module)
    for _ in range(2):
        module.step(optimizer)
        before = stored(module, tracked, declared)
    module.step(optimizer)
    set_a_rate(module, optimizer)
    wanted = stored(module, tracked, Declared({NAME: optimizer}))
    monkeypatch.setattr(DenseOptimizer, "stored", None)
    assert stored(module, tracked, declared) == wanted != before


def test_a_snapshot_keeps_its_groups(small_model: tuple[Model, TrackedModel]) -> None:
    """A background may still be writing the one before when a scheduler has changed a rate."""
    module, tracked = small_model
    optimizer: Any = plain(module)
    module.step(optimizer)
    declared = Declared({NAME: optimizer}).watching(module)
    take_states(module, tracked, declared)
    earlier = take_states(module, tracked, declared)
    tree, _ = earlier.encoded[NAME]
    before = repr(tree), repr(earlier.states[NAME])
    set_a_rate(module, optimizer)
    later = take_states(module, tracked, declared)
    assert (repr(tree), repr(earlier.states[NAME])) == before
    assert repr(later.encoded[NAME][0]) != before[0]


def test_a_renamed_model_is_stored_by_its_names(small_model: tuple[Model, TrackedModel]) -> None:
    module, tracked = small_model
    optimizer: Any = plain(module)
    module.step(optimizer)
    declared = Declared({NAME: optimizer}).watching(module)
    for _ in range(2):
        assert "one.weight" in str(stored(module, tracked, declared))
    module.first = module.one
    del module.one
    found = stored(module, tracked, declared)
    assert found == stored(module, tracked, Declared({NAME: optimizer}))
    assert "first.weight" in str(found)
