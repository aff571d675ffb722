"""Encode an optimizer at every step as it is then, whatever was changed or replaced since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torchrec_checknrun.memory.held_states import HeldStates, Taker
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.values.state import decode_state

NAME = "optimizer"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(2, 1)

    def step(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        self.other(self.one(torch.randn(4, 3))).sum().backward()
        optimizer.step()


def plain(model: Model) -> Optimizer:
    return Adam([{"params": model.one.parameters()}, {"params": model.other.parameters()}])


def wrapped(model: Model) -> Optimizer:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), lambda found: Adam(found))


def momentum(model: Model) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def inner(optimizer: Any) -> Any:
    return getattr(optimizer, "_optimizer", optimizer)


def nothing(model: Model, optimizer: Optimizer) -> None: ...


def take_a_step(model: Model, optimizer: Optimizer) -> None:
    model.step(optimizer)


def set_a_rate(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).param_groups[0]["lr"] *= 0.5


def set_a_rate_and_back(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).param_groups[0]["lr"] = 7.0
    inner(optimizer).param_groups[0]["lr"] = float("0.001")


def make_the_rate_a_tensor(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).param_groups[0]["lr"] = torch.tensor(0.25)


def add_an_option(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).param_groups[0]["note"] = "added"


def schedule(model: Model, optimizer: Optimizer) -> None:
    scheduler = ExponentialLR(inner(optimizer), 0.5)
    model.step(optimizer)
    scheduler.step()


def replace_a_state(model: Model, optimizer: Optimizer) -> None:
    state = inner(optimizer).state[model.one.weight]
    name = next(iter(state))
    state[name] = torch.full_like(state[name], 3.0)


def replace_memory(model: Model, optimizer: Optimizer) -> None:
    for value in inner(optimizer).state[model.one.weight].values():
        value.data = torch.full_like(value, 4.0)


def show_memory_in_another_form(model: Model, optimizer: Optimizer) -> None:
    for value in inner(optimizer).state[model.one.weight].values():
        value.data = value.data.view(torch.int32)


def cut_a_state(model: Model, optimizer: Optimizer) -> None:
    for value in inner(optimizer).state[model.one.weight].values():
        if value.dim():
            value.data = value.data[:1]


def forget_a_state(model: Model, optimizer: Optimizer) -> None:
    del inner(optimizer).state[model.one.weight]


def forget_all_state(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).state.clear()


def add_to_a_state(model: Model, optimizer: Optimizer) -> None:
    inner(optimizer).state[model.one.weight]["count"] = 3


def load(model: Model, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    inner(optimizer).state[model.one.bias][next(iter(inner(optimizer).state[model.one.bias]))] += 1


def drop_a_parameter(model: Model, optimizer: Optimizer) -> None:
    del inner(optimizer).state[inner(optimizer).param_groups[-1]["params"].pop()]


def replace_the_inner_one(model: Model, optimizer: Optimizer) -> None:
    """Put another optimizer inside a wrapper, which makes its state at the next step."""
    if isinstance(optimizer, KeyedOptimizerWrapper):
        optimizer._optimizer = Adam(model.parameters(), lr=0.5)
        optimizer.state = optimizer._optimizer.state
        optimizer.param_groups = optimizer._optimizer.param_groups


def replace_the_inner_one_by_a_users(model: Model, optimizer: Optimizer) -> None:
    if isinstance(optimizer, KeyedOptimizerWrapper):
        optimizer._optimizer = Counting(model.parameters())
        optimizer.state = optimizer._optimizer.state
        optimizer.param_groups = optimizer._optimizer.param_groups


def load_the_inner_one(model: Model, optimizer: Optimizer) -> None:
    """Load an optimizer whose wrapper keeps the earlier dicts."""
    other = Adam(model.parameters()) if isinstance(inner(optimizer), Adam) else momentum(model)
    model.step(other)
    groups = inner(optimizer).state_dict()["param_groups"]
    inner(optimizer).load_state_dict({**other.state_dict(), "param_groups": groups})


def keep_a_state_column_major(model: Model, optimizer: Optimizer) -> None:
    """As optimizers do that make their state like a parameter whose channels come last."""
    for value in inner(optimizer).state[model.one.weight].values():
        if value.dim() == 2:
            value.data = value.data.t().contiguous().t()


CHANGES = [
    nothing,
    take_a_step,
    set_a_rate,
    set_a_rate_and_back,
    make_the_rate_a_tensor,
    add_an_option,
    schedule,
    replace_a_state,
    replace_memory,
    show_memory_in_another_form,
    cut_a_state,
    forget_a_state,
    forget_all_state,
    add_to_a_state,
    load,
    drop_a_parameter,
    replace_the_inner_one,
    replace_the_inner_one_by_a_users,
    load_the_inner_one,
    keep_a_state_column_major,
]


@pytest.fixture
def model() -> Iterator[tuple[Model, TrackedModel]]:
    made = Model()
    tracked = TrackedModel(made)
    yield made, tracked
    tracked.close()


def taken(taker: Taker) -> tuple[object, bytes]:
    """Return the optimizer's tree and payload, as an image would hold them."""
    content = memoryview(b"".join(map(bytes, taker.take())))
    tree, payload = HeldStates.read(content).trees[NAME]
    return tree, bytes(payload)


@pytest.mark.parametrize("make", [plain, wrapped, momentum])
@pytest.mark.parametrize("change", CHANGES)
def test_the_content_is_the_present_one(
    model: tuple[Model, TrackedModel],
    make: Callable[[Model], Optimizer],
    change: Callable[[Model, Optimizer], None],
) -> None:
    module, tracked = model
    optimizer = make(module)
    taker = Taker(module, tracked, {NAME: optimizer})
    taken(taker)
    for _ in range(2):
        module.step(optimizer)
        taken(taker)
    change(module, optimizer)
    for _ in range(2):
        assert fields(taken(taker)) == fields(asked(module, tracked, optimizer))
        if change not in (drop_a_parameter, cut_a_state, show_memory_in_another_form):
            module.step(optimizer)


def asked(module: Model, tracked: TrackedModel, optimizer: Optimizer) -> tuple[object, bytes]:
    """Return the same of an optimizer that is asked each time."""
    taker = Taker(module, tracked, {NAME: optimizer})
    taker._kept[NAME]._nest = []
    return taken(taker)


def fields(found: tuple[object, bytes]) -> object:
    """Decode a tree, whose payload may hold other states as well."""
    tree, payload = found
    return repr(decode_state(tree, payload))  # type: ignore[arg-type]  # a tree


def test_nothing_is_asked_as_long_as_nothing_is_replaced(
    model: tuple[Model, TrackedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, tracked = model
    optimizer = plain(module)
    taker = Taker(module, tracked, {NAME: optimizer})
    for _ in range(2):
        module.step(optimizer)
        taken(taker)
    calls: list[object] = []

    def state_dict(optimizer: Adam) -> dict[str, Any]:
        calls.append(optimizer)
        return Optimizer.state_dict(optimizer)

    monkeypatch.setattr(Adam, "state_dict", state_dict, raising=False)
    before = taken(taker)
    module.step(optimizer)
    set_a_rate(module, optimizer)
    assert taken(taker) != before
    assert not calls


class Counting(Adam):
    """An optimizer with an attribute of its own."""

    def __init__(self, found: Any) -> None:
        super().__init__(found)
        self.inside = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def test_other_optimizers_are_asked_each_time(model: tuple[Model, TrackedModel]) -> None:
    module, tracked = model
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
