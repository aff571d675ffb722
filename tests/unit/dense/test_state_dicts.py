"""Ask optimizers for state dicts: nothing but tables' state is left out of a combined one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.unit.tracked_model import make_model
from torchrec_checknrun.dense.state_dicts import state_dict_of
from torchrec_checknrun.tracking import track
from torchrec_checknrun.values.state import SHARDED

pytestmark = pytest.mark.usefixtures("group")


class Plain(FusedOptimizer):
    """Keeps a state that is no sharded tensor."""

    def __init__(self, name: str) -> None:
        parameter = nn.Parameter(torch.ones(2))
        super().__init__({name: parameter}, {parameter: {"t.momentum1": torch.ones(2)}}, [])

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = False) -> None: ...


class OwnForm(CombinedOptimizer):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "own": 1}


def dense() -> KeyedOptimizerWrapper:
    net = nn.Linear(2, 1)
    made = KeyedOptimizerWrapper(
        {f"net.{name}": parameter for name, parameter in net.named_parameters()},
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    net(torch.ones(1, 2)).sum().backward()
    made.step()
    return made


def patched(fused: Any) -> Optimizer:
    optimizer: Any = CombinedOptimizer([fused, dense()])
    own = optimizer.state_dict
    optimizer.state_dict = lambda: {**own(), "own": 1}
    made: Optimizer = optimizer
    return made


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "usual": lambda fused: CombinedOptimizer([fused, dense()]),
    "named": lambda fused: CombinedOptimizer([("a", fused), ("b", dense())]),
    "nested": lambda fused: CombinedOptimizer(
        [("a", CombinedOptimizer([("b", fused)])), ("c", CombinedOptimizer([("d", dense())]))]
    ),
    "tables only": lambda fused: fused,
    "dense only": lambda _: CombinedOptimizer([dense()]),
    "not combined": lambda _: dense(),
    "a table's state that is not sharded": lambda fused: CombinedOptimizer(
        [fused, ("other", Plain("ebc.embedding_bags.wide.weight"))]
    ),
    "a form of its own": lambda fused: OwnForm([fused, dense()]),
    "patched": patched,
}


def rest(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without entries of nothing but sharded tensors."""
    kept = {
        key: of_key
        for key, of_key in state["state"].items()
        if not all(isinstance(value, SHARDED) for value in of_key.values())
    }
    return {**{k: v for k, v in state.items() if k != "param_groups"}, "state": kept}


@pytest.mark.parametrize("name", MADE)
def test_all_but_tables_is_there(name: str) -> None:
    model: Any = make_model()
    tracked = track(model)
    optimizer = MADE[name](model.fused_optimizer)
    found = state_dict_of(optimizer, tracked.tables)
    wanted = optimizer.state_dict()
    assert rest(found).keys() == rest(wanted).keys()
    assert list(rest(found)["state"]) == list(rest(wanted)["state"])
    for key, of_key in rest(wanted)["state"].items():
        assert of_key.keys() == found["state"][key].keys()
        assert all(found["state"][key][k] is value for k, value in of_key.items())
    tracked.close()


def test_tables_are_left_out_if_they_are_known() -> None:
    model: Any = make_model()
    tracked = track(model)
    optimizer = CombinedOptimizer([model.fused_optimizer, dense()])
    assert state_dict_of(optimizer, tracked.tables)["state"].keys() == {"net.weight", "net.bias"}
    some = [table for table in tracked.tables if not table.endswith("wide")]
    assert any("wide" in key for key in state_dict_of(optimizer, some)["state"])
    tracked.close()
