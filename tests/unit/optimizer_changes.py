"""Change a dense optimizer in all ways in which what is stored of it changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper


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


def combined(model: Model) -> Optimizer:
    """As with tables in fused kernels, in two collections."""
    fused = CombinedOptimizer([("one", EmptyFusedOptimizer()), ("other", EmptyFusedOptimizer())])
    return CombinedOptimizer([fused, wrapped(model)])


MAKES = [plain, wrapped, momentum, combined]


def wrapper(optimizer: Any) -> Any:
    """Return the dense part of a combined optimizer, or the optimizer itself."""
    parts = [part for _, part in getattr(optimizer, "_optims", ())]
    return parts[1] if parts else optimizer


def inner(optimizer: Any) -> Any:
    own = wrapper(optimizer)
    return getattr(own, "_optimizer", own)


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
    own = wrapper(optimizer)
    if isinstance(own, KeyedOptimizerWrapper):
        own._optimizer = Adam(model.parameters(), lr=0.5)
        own.state, own.param_groups = own._optimizer.state, own._optimizer.param_groups


def replace_the_inner_one_by_a_users(model: Model, optimizer: Optimizer) -> None:
    own = wrapper(optimizer)
    if isinstance(own, KeyedOptimizerWrapper):
        own._optimizer = Counting(model.parameters())
        own.state, own.param_groups = own._optimizer.state, own._optimizer.param_groups


def replace_a_part(model: Model, optimizer: Optimizer) -> None:
    """Put another optimizer beside the fused ones, which makes its state at the next step."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._optims[1] = ("", wrapped(model))


def add_a_part(model: Model, optimizer: Optimizer) -> None:
    """Put one more optimizer beside the others, with state of its own."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._optims.append(("more", _more()))


def add_a_part_to_the_fused_ones(model: Model, optimizer: Optimizer) -> None:
    """Put an optimizer with state of its own where only fused ones were."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._optims[0][1]._optims.append(("more", _more()))


def _more() -> KeyedOptimizerWrapper:
    more = nn.Parameter(torch.ones(3))
    made = KeyedOptimizerWrapper({"more": more}, lambda found: Adam(found))
    more.sum().backward()
    made.step()
    return made


def rename_a_part(model: Model, optimizer: Optimizer) -> None:
    if isinstance(optimizer, CombinedOptimizer):
        optimizer._optims[1] = ("dense", optimizer._optims[1][1])


def keep_a_note(model: Model, optimizer: Optimizer) -> None:
    """Give the outermost optimizer a state dict of its own, which says something else each time."""
    shown, seen = optimizer.state_dict, model.one.weight
    optimizer.state_dict = lambda: {**shown(), "note": seen.sum().item()}  # type: ignore[method-assign]  # a user's


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
    replace_a_part,
    add_a_part,
    add_a_part_to_the_fused_ones,
    rename_a_part,
    keep_a_note,
    keep_a_state_column_major,
]


LAST = (drop_a_parameter, cut_a_state, show_memory_in_another_form)
"""Changes after which the optimizer can't step any more."""


class Counting(Adam):
    """An optimizer with an attribute of its own."""

    def __init__(self, found: Any) -> None:
        super().__init__(found)
        self.inside = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
