"""Find a model's state beside tables anew wherever asking again could say something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.tracked_model import make_model
from torchrec_checknrun.model.dense_model import DenseModel
from torchrec_checknrun.model.module_tree import ModuleTree
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.tracking import track


@pytest.fixture
def tracked() -> Iterator[TrackedModel]:
    made = TrackedModel(nn.Module())
    yield made
    made.close()


def made(model: nn.Module, tracked: TrackedModel) -> DenseModel:
    return DenseModel(model, tracked, ModuleTree(model))


class OwnStateDict(nn.Linear):
    """Saves its average in place of its weight, or not."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.averaged = False
        self.register_buffer("average", torch.ones(2, 2))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        if self.averaged:
            found[f"{kwargs.get('prefix', '')}weight"] = self.average
        return found


class OwnPart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.averaged = False
        self.register_buffer("average", torch.ones(2, 2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.averaged:
            destination[f"{prefix}weight"] = self.average


def hooked() -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model.averaged = False
    model.register_buffer("average", torch.ones(2, 2))

    def average(module: Any, found: Any, prefix: str, _: object) -> None:
        if module.averaged:
            found[f"{prefix}weight"] = module.average

    model.register_state_dict_post_hook(average)
    return model


def patched() -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model.averaged = False
    model.register_buffer("average", torch.ones(2, 2))
    own = model.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        if model.averaged:
            found[f"{kwargs.get('prefix', '')}weight"] = model.average
        return found

    model.state_dict = state_dict
    return model


@pytest.mark.parametrize("make", [OwnStateDict, OwnPart, hooked, patched])
def test_a_users_own_state_dict_is_asked_each_time(
    make: Callable[[], Any], tracked: TrackedModel
) -> None:
    part = make()
    dense = made(nn.Sequential(part), tracked)
    before = dense.find().dense
    assert not torch.equal(before["0.weight"], part.average)
    part.averaged = True
    assert torch.equal(dense.find().dense["0.weight"], part.average)


def test_values_that_are_no_memory_of_the_model_are_asked_each_time(tracked: TrackedModel) -> None:
    class Counts(nn.Module):
        count = 0

        def get_extra_state(self) -> torch.Tensor:
            self.count += 1
            return torch.tensor(self.count)

        def set_extra_state(self, state: object) -> None: ...

    dense = made(Counts(), tracked)
    assert [int(dense.find().dense["_extra_state"]) for _ in range(3)] == [1, 2, 3]


def test_extra_state_that_shows_more_of_a_buffer_each_time(tracked: TrackedModel) -> None:
    class Ring(nn.Module):
        values: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.arange(4.0), persistent=False)
            self.used = 1

        def get_extra_state(self) -> torch.Tensor:
            return self.values[: self.used]

        def set_extra_state(self, state: object) -> None: ...

    ring = Ring()
    dense = made(ring, tracked)
    for ring.used in (1, 2, 3):
        found = dense.find()
        assert found.dense["_extra_state"].tolist() == [0.0, 1.0, 2.0][: ring.used]
        assert found.parameters == []  # no optimizer's step tells when it is written


def test_a_hook_registered_later_is_noticed(tracked: TrackedModel) -> None:
    model = nn.Linear(2, 2)
    dense = made(model, tracked)
    assert dense.find() is dense.find()

    def drop(module: nn.Module, found: Any, prefix: str, _: object) -> None:
        del found[f"{prefix}bias"]

    model.register_state_dict_post_hook(drop)
    assert dense.find().dense.keys() == {"weight"}


def test_a_buffer_that_is_no_longer_saved_is_noticed(tracked: TrackedModel) -> None:
    model = nn.BatchNorm1d(2)
    dense = made(model, tracked)
    assert "running_mean" in dense.find().dense
    model._non_persistent_buffers_set.add("running_mean")
    assert "running_mean" not in dense.find().dense


def test_names_and_buffers_are_the_present_ones(tracked: TrackedModel) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    dense = made(model, tracked)
    assert dense.find().buffers == frozenset()
    model.append(nn.BatchNorm1d(2))
    found = dense.find()
    assert found.buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(found.names.values()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def bytes_of(dense: DenseModel) -> bytes:
    return b"".join(map(bytes, dense.find().encoded[1]))


@pytest.mark.parametrize("like", ["plain", "conjugated", "negative"])
def test_encoded_values_are_the_present_ones(tracked: TrackedModel, like: str) -> None:
    base = torch.ones(2, dtype=torch.complex64)
    shown = {"plain": base, "conjugated": base.conj(), "negative": base.conj().imag}[like]
    model = nn.BatchNorm1d(2)
    model.register_buffer("shown", shown)
    dense = made(model, tracked)
    before = bytes_of(dense)
    base.mul_(2 + 3j)
    after = bytes_of(dense)
    assert after != before
    assert after == bytes_of(made(model, tracked))


def test_tables_memory_is_the_present_one(group: None) -> None:
    model = make_model()
    with closing(track(model)) as tracked:
        before = tracked.dense.stored()
        assert tracked.dense.stored() is before
        kernel = tracked.shards[0].writes.kernel
        shards = kernel.shards
        states = [{name: s.clone() for name, s in shard.optimizer.items()} for shard in shards]
        kernel._set([shard.weight.clone() for shard in shards], states)
        tensors = [tensor for shard in shards for tensor in shard.tensors]
        assert not any(map(before.holds, tensors))
        assert all(map(tracked.dense.stored().holds, tensors))


def test_tables_that_were_moved_in_place_are_found(group: None) -> None:
    model = make_model()
    with closing(track(model)) as tracked:
        before = tracked.dense.stored()
        weights = [shard.local.weight for shard in tracked.shards]
        assert all(map(before.holds, weights))
        for weight in weights:
            weight.share_memory_()
        assert not any(map(before.holds, weights))
        assert all(map(tracked.dense.stored().holds, weights))


def test_tables_of_new_shards_are_found(group: None) -> None:
    model: Any = make_model()
    other: Any = make_model()
    with closing(track(model)) as tracked:
        before = tracked.dense.stored()
        model.module.ebc = other.module.ebc
        tracked.refresh()
        tensors = [tensor for shard in tracked.shards for tensor in shard.local.tensors]
        assert not any(map(before.holds, tensors))
        assert all(map(tracked.dense.stored().holds, tensors))


def test_generations() -> None:
    model = nn.Linear(2, 2)
    tree = ModuleTree(model)
    first = tree.generation()
    assert tree.generation() == first
    with torch.no_grad():
        model.weight.add_(1)
    assert tree.generation() == first
    model.weight.data = torch.ones(2, 2)
    second = tree.generation()
    assert second != first
    assert tree.generation() == second
    tree.forget()
    assert tree.generation() != second
