"""Restore what an optimizer keeps by parameter, or by the id of one or of a group: each process has
others.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torchrec.optim.keyed import KeyedOptimizerWrapper

from tests.crash.save_sweep import alone
from tests.distributed.live_optimizers import differences, live
from tests.unit.mixed_job import Job
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.dense.live_values import LIVE, pack, put, why_not
from torchrec_checknrun.dense.references import References
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with alone():
        yield


class Masked(optim.SGD):
    """An optimizer that leaves parameters out, and scales others by what it has seen of them."""

    def __init__(self, params: Any, key: Callable[[torch.Tensor], Any], kind: Any = dict) -> None:
        super().__init__(params, lr=0.03)
        self.key = key
        self.seen = kind()
        self.left_out: set[Any] = set()
        self.order: list[Any] = []
        self.names = {id(p): i for i, p in enumerate(self.param_groups[0]["params"])}
        self.last: int | None = None
        self.steps_of = {id(group): 0 for group in self.param_groups}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for number, p in enumerate(parameters):
            assert p.grad is not None
            assert id(p) in self.names
            if self.key(p) not in self.seen:
                self.seen[self.key(p)] = {"norm": torch.zeros(()), "steps": 0}
                self.order.append(id(p))
            of_p = self.seen[self.key(p)]
            of_p["norm"] += p.grad.norm()
            of_p["steps"] += 1
            if of_p["steps"] == number + 1:
                self.left_out.add(self.key(p))
            p.grad.mul_(1 / (1 + of_p["norm"]) * (self.key(p) not in self.left_out))
            self.last = id(p)
        self.steps_of[id(self.param_groups[0])] += 1
        super().step()


def itself(parameter: torch.Tensor) -> Any:
    return parameter


KEYS = {"itself": itself, "id": id}
KINDS: dict[str, Any] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda: defaultdict(dict),
}
HOLDERS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "in TorchRec's": lambda job: {"optimizer": job.optimizer},
    "alone": lambda job: {"dense": job.dense._optimizer, "fused": job.model.fused_optimizer},
}


def started(root: Path, key: Callable[..., Any], kind: Any, holder: str) -> tuple[Job, Any]:
    job = Job(root.with_name("unused"), lambda p: Masked(p, key, kind))
    job.saver.close()
    states = HOLDERS[holder](job)
    saver = Checkpointer(root, model=job.model, state=states)
    saver.restore()
    return job, saver


def train(job: Job, saver: Any, steps: int) -> None:
    for _ in range(steps):
        job.optimizer.zero_grad()
        job.backward()
        job.optimizer.step()
        saver.step()


def content(job: Job) -> dict[str, str]:
    found = live(job.model, held=job.dense._optimizer)
    torchs = ("differentiable", ".defaults", "_zero_grad_profile_name", ".key")  # a load makes them
    return {k: v for k, v in found.items() if not (k.endswith(torchs) or "steps_of" in k)}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_a_run_goes_on_as_one_that_was_not_interrupted(
    tmp_path: Path, key: str, kind: str, holder: str, caplog: pytest.LogCaptureFixture
) -> None:
    how = (KEYS[key], KINDS[kind], holder)
    whole, whole_saver = started(tmp_path / "whole", *how)
    train(whole, whole_saver, 6)
    first, saver = started(tmp_path / "run", *how)
    train(first, saver, 2)
    saver.save()
    saver.close()
    with caplog.at_level(logging.WARNING):
        again, saver = started(tmp_path / "run", *how)
        train(again, saver, 4)
    held = again.dense._optimizer
    assert type(held.seen) is type(KINDS[kind]())
    assert held.steps_of == {id(held.param_groups[0]): 6}
    assert len(held.seen) == 3
    assert len(held.left_out) == 3
    assert differences(content(again), content(whole)) == []
    assert not [line for line in caplog.messages if "keeps its present value" in line]
    saver.close()
    whole_saver.close()


def packed(value: Any, references: References) -> tuple[Any, dict[str, object]]:
    lost: dict[str, object] = {}
    return pack(value, references, "it", lost), lost


def test_each_form_comes_back_for_the_parameters_of_another_process() -> None:
    one, other = (nn.Linear(2, 2), nn.Linear(2, 2))
    here = References([*one.parameters()], one.named_parameters())
    there = References([*other.parameters()], other.named_parameters())

    def values(layer: nn.Linear) -> list[Any]:
        w, b = layer.weight, layer.bias
        return [
            id(w),
            [id(b), 3, (id(w),)],
            {id(w): 1, "more": {id(b): [id(b)]}, 7: 2},
            {w: "weight", b: "bias", "$dict": 1},
            frozenset({id(w), 5, "five"}),
            {w, id(b)},
            frozenset({w, b}),
            {"only": {id(w)}},
            {"$items": id(w)},
        ]

    found, lost = packed(values(one), here)
    assert not lost
    assert why_not(values(other), found, there) is None
    assert put(None, found, there, None) == values(other)
    fresh = put(values(one)[2], found[2], there, None, fresh=True)
    assert fresh == values(other)[2]


def test_what_belongs_to_a_missing_parameter_is_told() -> None:
    layer, less = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    here = References([], layer.named_parameters())
    there = References([], less.named_parameters())
    forms = (id(layer.bias), {id(layer.bias): 1}, {layer.bias: 1}, [{id(layer.bias)}])
    for value in forms:
        found, _ = packed(value, here)
        why = why_not(None, found, there)
        assert why is not None
        assert "it was kept for 'bias' by its id, or as a key, which is missing now" in why


def test_keys_of_neither_kind_are_told() -> None:
    layer = nn.Linear(2, 2)
    here = References([*layer.parameters()], layer.named_parameters())
    found, lost = packed({layer.weight: 1, torch.zeros(1): 2}, here)
    assert (found, [*lost]) == (LIVE, ["it"])
    found, lost = packed({id(layer.weight), 2.5}, here)
    assert (found, [*lost]) == (LIVE, ["it"])
    assert packed({layer.weight: layer.bias}, here) == (LIVE, {})  # of references alone


def test_numbers_that_are_no_ids_stay_numbers() -> None:
    layer = nn.Linear(2, 2)
    here = References([], layer.named_parameters())
    value = {"seed": id(layer.weight) + 1, 5: True, "big": 1 << 62}
    assert packed(value, here) == (value, {})


def test_a_checkpoint_by_ids_is_restored_into_a_wrapper(tmp_path: Path) -> None:
    """Name parameters as TorchRec's wrapper does, which are other names than the model's."""

    def run(steps: int) -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(2, 1)
        named = {f"of_{n}": p for n, p in layer.named_parameters()}
        dense = KeyedOptimizerWrapper(named, lambda p: Masked(p, id))
        saver = Checkpointer(tmp_path, model=layer, state={"dense": dense})
        saver.restore()
        for _ in range(steps):
            layer(torch.ones(1, 2)).sum().backward()
            dense.step()
            saver.step()
        saver.save()
        saver.close()
        return layer, dense._optimizer

    run(2)
    layer, masked = run(0)
    assert masked.seen.keys() == {id(layer.weight), id(layer.bias)}
    assert masked.last == id(layer.bias)
    assert masked.steps_of == {id(masked.param_groups[0]): 2}


class ById(optim.Optimizer):
    """An optimizer that keeps the parameters' state itself by their ids, which are their hashes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.03})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # overloaded
        state: dict[Any, Any] = self.state
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                of_p = state.setdefault(id(p), {"mean": torch.zeros_like(p), "steps": 0})
                of_p["steps"] += 1
                of_p["mean"].lerp_(p.grad, 1 / of_p["steps"])
                p.sub_(of_p["mean"], alpha=0.03)


@pytest.mark.parametrize("survive", [False, True])
def test_state_by_ids_comes_back(tmp_path: Path, survive: bool) -> None:
    if survive and not has_extension():
        pytest.skip("images need the compiled kernel, which was not built")
    options: dict[str, Any] = {"survive": Images(folder=str(tmp_path))} if survive else {}

    def begun(name: str) -> tuple[Job, Any]:
        job = Job(tmp_path / "unused", ById)
        job.saver.close()
        states = HOLDERS["alone"](job)
        saver = Checkpointer(tmp_path / name, model=job.model, state=states, **options)
        saver.restore()
        return job, saver

    whole, whole_saver = begun("whole")
    train(whole, whole_saver, 6)
    first, saver = begun("run")
    train(first, saver, 2)
    saver.save()
    saver.wait()
    saver._release(failed=True)  # as a process that dies; its image stays
    files._mapped.clear()
    del first
    again, saver = begun("run")
    train(again, saver, 4)
    assert [of_p["steps"] for of_p in again.dense._optimizer.state.values()] == [6, 6, 6]
    assert differences(content(again), content(whole)) == []
    saver.close()
    whole_saver.close()


def test_state_by_ids_in_the_place_of_another_optimizers_is_told(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)

    def saver(optimizer: optim.Optimizer) -> Checkpointer:
        return Checkpointer(tmp_path, model=layer, state={"dense": optimizer})

    adam = optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    layer.zero_grad()
    with saver(adam) as first:
        first.steps = 1
        first.save()
    with saver(ById(layer.parameters())) as again, pytest.raises(IncompatibleCheckpoint):
        again.restore()
