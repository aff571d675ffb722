"""Restore nests of optimizers, held in any attribute, without a step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, optimizer

from tests.distributed.optimizer_nests import FACTORIES, goes_on, layout
from tests.unit.chains import one_thread
from tests.unit.inner_nests import NESTS, Lookahead, adam, looking, model, sam, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dense.first_state import first_state
from torchrec_checknrun.errors import IncompatibleCheckpoint


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def inside(nest: Optimizer) -> Iterator[Optimizer]:
    yield nest
    for name in ("base", "base_optimizer", "inner", "optimizer", "_optimizer"):
        if name in vars(nest):
            yield from inside(vars(nest)[name])


@pytest.mark.parametrize("name", NESTS)
def test_every_nest_comes_back(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    layers = model()
    nest = NESTS[name](layers)
    train(layers, nest)
    for each in inside(nest):
        for group in each.param_groups:
            if "lr" in group:
                group["lr"] = 0.02
    with Checkpointer(tmp_path, model=layers, state={"optimizer": nest}) as saver:
        saver.save()
    train(layers, nest, seed=2)
    again = model()
    restored = NESTS[name](again)
    with Checkpointer(tmp_path, model=again, state={"optimizer": restored}) as saver:
        assert saver.restore() is not None
    train(again, restored, seed=2)
    for key, value in layers.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
    for one, other in zip(inside(nest), inside(restored), strict=True):
        assert getattr(one, "count", 0) == getattr(other, "count", 0)


@pytest.mark.parametrize("name", ["lookahead", "lookahead in torchrec", "sam", "ramp", "split"])
@pytest.mark.parametrize("width", [3, 4])
def test_a_restore_takes_no_step(tmp_path: Path, name: str, width: int) -> None:
    layers = model()
    nest = NESTS[name](layers)
    train(layers, nest)
    with Checkpointer(tmp_path, model=layers, state={"optimizer": nest}) as saver:
        saver.save()
    again = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    other = NESTS[name](again)
    again(torch.ones(1, 4)).sum().backward()
    before = copy.deepcopy(again.state_dict())
    steps: list[Optimizer] = []
    handle = optimizer.register_optimizer_step_post_hook(
        lambda stepped, *_: steps.extend(set(inside(other)) & {stepped})
    )
    with Checkpointer(tmp_path, model=again, state={"optimizer": other}) as saver:
        if width == 3:
            saver.restore()
        else:
            with pytest.raises(IncompatibleCheckpoint):
                saver.restore()
            for key, value in again.state_dict().items():
                assert torch.equal(value, before[key])
            assert not any(state for each in inside(other) for state in each.state.values())
    handle.remove()
    assert not steps


def test_attributes_are_not_touched() -> None:
    layers = model()
    outer = Lookahead(adam(layers))
    weight = next(layers.parameters())
    before = weight.detach().clone()
    made = first_state(outer, outer.param_groups[0], weight)
    assert made is not None
    assert set(made) == {"slow"}
    assert (outer.count, outer.log, outer.sums.tolist()) == (0, [], [0, 0])
    assert not outer.base.state
    assert torch.equal(weight, before)


def test_an_object_that_a_step_changes() -> None:
    class Decay:
        def __init__(self) -> None:
            self.taken = [0]

        def __call__(self) -> float:
            self.taken[0] += 1
            return 1 / self.taken[0]

    class Decaying(torch.optim.SGD):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__(layers.parameters(), lr=0.1, momentum=0.9)
            self.decay = Decay()
            self.logger = logging.getLogger("decaying")

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
            self.decay()
            super().step()

    decaying = Decaying(model())
    group = decaying.param_groups[0]
    made = first_state(decaying, group, group["params"][0])
    assert made is not None
    assert set(made) == {"momentum_buffer"}
    assert decaying.decay.taken == [0]


def test_an_object_of_its_own_is_not_stepped() -> None:
    class Holding(torch.optim.SGD):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__(layers.parameters(), lr=0.1)
            self.average = nn.Linear(1, 1)
            self.params = list(layers.parameters())

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
            with torch.no_grad():
                for p in (*self.average.parameters(), *self.params):
                    p.add_(1)

    layers = model()
    holding = Holding(layers)
    before = copy.deepcopy([*layers.parameters(), *holding.average.parameters()])
    assert first_state(holding, holding.param_groups[0], before[0]) is None
    after = [*layers.parameters(), *holding.average.parameters()]
    assert all(map(torch.equal, before, after))


def test_sam_keeps_its_groups(tmp_path: Path) -> None:
    layers = model()
    nest = sam(layers)
    groups, group = nest.param_groups, nest.param_groups[0]
    with Checkpointer(tmp_path, model=layers, state={"optimizer": nest}) as saver:
        train(layers, nest)
        saver.save()
        saver.restore()
    assert nest.param_groups is nest.base_optimizer.param_groups is groups
    assert groups[0] is group


def test_other_inner_optimizers_are_refused(tmp_path: Path) -> None:
    layers = model()
    nest = Lookahead(adam(layers))
    train(layers, nest)
    with Checkpointer(tmp_path, model=layers, state={"optimizer": nest}) as saver:
        saver.save()
    again = model()
    plain = torch.optim.SGD(again.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model=again, state={"optimizer": plain}) as saver:
        with pytest.raises(IncompatibleCheckpoint, match=r"Lookahead\.base"):
            saver.restore()
        assert saver.restore(strict=False) is not None


def test_nothing_stays_of_a_checkpointer_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = model()
    nest = Lookahead(adam(layers))

    def hooks() -> list[int]:
        of_parameters = [len(p._post_accumulate_grad_hooks or ()) for p in layers.parameters()]
        return [len(optimizer._global_optimizer_post_hooks), *of_parameters]

    before = hooks()
    monkeypatch.setattr("torchrec_checknrun.run.assembly.Schedule", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Checkpointer(tmp_path, model=layers, state={"optimizer": nest})
    assert hooks() == before
    monkeypatch.undo()
    Checkpointer(tmp_path, model=layers, state={"optimizer": nest}).close()
    assert hooks() == before


class Quasi(torch.optim.LBFGS):
    """Keeps all state with its first parameter, none of it by rows, and a history in lists."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, max_iter=1)
        self._numel()  # a cache

    def step(self, closure: Any = None) -> Any:
        return super().step(closure or (lambda: torch.tensor(1.0)))


@pytest.mark.parametrize("nest", ["combined", "averaging"])
@pytest.mark.parametrize("make", [looking, Quasi])
def test_data_parallel_tables(
    tmp_path: Path, group: None, nest: str, make: Callable[[Any], Optimizer]
) -> None:
    """Save the rows of both optimizers' state with the tables."""
    FACTORIES["lookahead"] = make
    case = {"nest": nest, "factory": "lookahead"}
    try:
        both = layout("data_parallel", "row_wise", ranks=1)
        assert goes_on(str(tmp_path), [{"layout": both, **case}]) == []
    finally:
        del FACTORIES["lookahead"]
