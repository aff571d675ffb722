"""Restore optimizers' state of odd kinds: of no parameter, of several at once, text, arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.unit.chains import one_thread
from tests.unit.inner_nests import model, train
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.dense import wrappers
from torchrec_checknrun.errors import SaveFailed


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


class Odd(Optimizer):
    """A user's optimizer, whose steps depend on all that it keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        own: Any = self.state
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"phase": "", "moment": torch.zeros_like(parameter), "tags": {"a": [""]}}
                state["steps"] = torch.zeros((), dtype=torch.float64)
            state["phase"] += "x"
            state["tags"]["a"][0] += "y"
            state["steps"] += 0.1
            state["moment"].lerp_(parameter.grad, 0.5)
            factor = len(state["phase"]) + len(state["tags"]["a"][0]) + float(state["steps"])
            parameter.sub_(state["moment"] * self.factor(state, own) * factor, alpha=1e-5)

    def factor(self, state: dict[str, Any], own: Any) -> float:
        return 1.0


class Whole(Odd):
    """An optimizer that keeps state of no parameter as well."""

    def factor(self, state: dict[str, Any], own: Any) -> float:
        kept = own["whole"]
        kept["count"] += 1
        kept["sum"] += 0.25
        kept["last"] = [*kept["last"][-1:], torch.ones(2) * kept["count"]]
        own["calls"] = own.get("calls", 0) + 1
        return float(kept["sum"]) + sum(float(each.sum()) for each in kept["last"]) + own["calls"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        own: Any = self.state
        if "whole" not in own:
            own["whole"] = {"count": 0, "sum": torch.zeros((), dtype=torch.float64), "last": []}
        super().step(closure)


class Shared(Odd):
    """All parameters share a tensor."""

    def factor(self, state: dict[str, Any], own: Any) -> float:
        if "common" not in state:
            found = [each["common"] for each in own.values() if "common" in each]
            state["common"] = found[0] if found else torch.zeros(1)
        state["common"] += 1
        return float(state["common"])


class Counted(Odd):
    """An optimizer that keeps sets and NumPy arrays, which torch's own loading can't put back."""

    def factor(self, state: dict[str, Any], own: Any) -> float:
        state.setdefault("seen", set()).add(len(state["phase"]))
        counts = state.setdefault("counts", np.zeros(2))
        counts += 0.5
        state["pairs"] = [np.ones(1) * len(state["seen"]), torch.ones(2) * len(state["seen"])]
        return float(counts.sum() + state["pairs"][0][0] + state["pairs"][1].sum())


class Windows(Odd):
    """An optimizer that keeps the last values by step, in dicts whose keys come and go."""

    def factor(self, state: dict[str, Any], own: Any) -> float:
        step = len(state["phase"])
        history: dict[str, Any] = state.setdefault("history", {"counts": {}, "rows": {}})
        history["counts"][f"step{step}"] = step
        history["rows"][step] = torch.ones(step)
        for kept, old in ((history["counts"], f"step{step - 3}"), (history["rows"], step - 3)):
            kept.pop(old, None)
        return sum(history["counts"].values()) + float(
            sum(map(torch.sum, history["rows"].values()))
        )


class Early(Odd):
    """An optimizer that makes a part of its state when it is made itself, the rest at a step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["chosen"] = parameter.detach() > 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            chosen = state["chosen"]
            moments = state.setdefault("moments", torch.zeros(int(chosen.sum())))
            moments.lerp_(parameter.grad[chosen], 0.5)
            parameter[chosen] -= moments * 0.01


class Twins(Odd):
    """A tensor of each parameter's state is one of its group, or the optimizer's own, as well."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.calls = self.param_groups[0]["rounds"] = torch.zeros(())

    def factor(self, state: dict[str, Any], own: Any) -> float:
        self.calls += 1
        return float(state.setdefault("rounds", self.calls))


def keyed(layers: nn.Module, make: Any) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(layers.named_parameters()), make)


OPTIMIZERS: dict[str, Any] = {
    "text": lambda layers: Odd(layers.parameters()),
    "whole": lambda layers: Whole(layers.parameters()),
    "shared": lambda layers: Shared(layers.parameters()),
    "sets and arrays": lambda layers: Counted(layers.parameters()),
    "sets and arrays in torchrec": lambda layers: keyed(layers, Counted),
    "text in torchrec": lambda layers: keyed(layers, Odd),
    "shared in torchrec": lambda layers: keyed(layers, Shared),
    "a part at once": lambda layers: Early(layers.parameters()),
    "a part at once in torchrec": lambda layers: keyed(layers, Early),
    "windows": lambda layers: Windows(layers.parameters()),
    "windows in torchrec": lambda layers: keyed(layers, Windows),
}


@pytest.mark.parametrize("survive", [None, Images()])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_of_it_comes_back(tmp_path: Path, name: str, survive: Images | None) -> None:
    torch.manual_seed(0)
    layers = model()
    optimizer = OPTIMIZERS[name](layers)
    train(layers, optimizer)
    state = {"optimizer": optimizer}
    with Checkpointer(tmp_path, model=layers, state=state, survive=survive) as saver:
        saver.save()
        train(layers, optimizer, seed=2)
    again = model()
    other = OPTIMIZERS[name](again)
    with Checkpointer(tmp_path, model=again, state={"optimizer": other}) as saver:
        assert saver.restore() is not None
        for _ in range(2):  # of an optimizer that has state of its own by now
            train(again, other, seed=2)
            for key, value in layers.state_dict().items():
                assert torch.equal(again.state_dict()[key], value)
            assert saver.restore() is not None


def test_state_of_no_parameter_goes_where_there_was_none(tmp_path: Path) -> None:
    layers = model()
    optimizer = OPTIMIZERS["whole"](layers)
    with Checkpointer(tmp_path, model=layers, state={"optimizer": optimizer}) as saver:
        saver.save()
        train(layers, optimizer)
        assert "whole" in optimizer.state
        saver.restore()
    assert not optimizer.state


def test_a_parameter_that_two_parts_have_and_one_steps_is_refused(tmp_path: Path) -> None:
    layers = model()

    def dense(dimensions: int) -> KeyedOptimizerWrapper:
        own = [p for p in layers.parameters() if p.dim() == dimensions]
        return keyed(layers, lambda _: torch.optim.Adam(own))

    optimizer = CombinedOptimizer([("matrices", dense(2)), ("vectors", dense(1))])
    with Checkpointer(tmp_path, model=layers, state={"optimizer": optimizer}) as saver:
        saver.save()  # of no state yet
        train(layers, optimizer)
        with pytest.raises(SaveFailed, match="only the parameters that its optimizer steps"):
            saver.save()


@pytest.mark.parametrize("make", [lambda m: Twins(m.parameters()), lambda m: keyed(m, Twins)])
def test_a_tensor_that_comes_back_as_two_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrappers, "_warned", set())
    layers = model()
    optimizer = make(layers)
    train(layers, optimizer)
    with Checkpointer(tmp_path, model=layers, state={"optimizer": optimizer}) as saver:
        saver.save()
    told = [line for line in caplog.messages if "will not be the same tensor" in line]
    assert ["Twins.calls" in line for line in told] == [True, False]
    assert "Twins.param_groups[…]['rounds']" in told[1]


class Fast(Odd):
    """An optimizer around another one, with that one's state at hand, as Lookahead has it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.optimizer = torch.optim.Adam(self.param_groups[0]["params"])
        self.fast_state = self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        self.optimizer.step()
        super().step(closure)

    def factor(self, state: dict[str, Any], own: Any) -> float:
        return float(len(self.fast_state))


def test_another_ones_state_at_hand_is_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers, again = model(), model()
    optimizer, other = Fast(layers.parameters()), Fast(again.parameters())
    train(layers, optimizer)
    with Checkpointer(tmp_path, model=layers, state={"optimizer": optimizer}) as saver:
        saver.save()
    train(layers, optimizer, seed=2)
    with Checkpointer(tmp_path, model=again, state={"optimizer": other}) as saver:
        saver.restore()
    train(again, other, seed=2)
    assert all(map(torch.equal, layers.parameters(), again.parameters()))
    assert other.fast_state is other.optimizer.state
    assert "fast_state" not in caplog.text
