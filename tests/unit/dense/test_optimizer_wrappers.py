"""Restore wrapped optimizers, schedulers and rates on one rank; compare live objects."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torchrec.optim.keyed import KeyedOptimizer

from tests.distributed.live_optimizers import differences, kernels
from tests.distributed.optimizer_nests import (
    ALONE,
    FACTORIES,
    NESTS,
    SCHEDULES,
    Averaging,
    Run,
    both,
    clip,
    goes_on,
    layout,
    warm,
)
from tests.examples import some_of
from tests.unit.chains import one_thread
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.tracking import track

TABLES = layout("table_wise:0", "table_wise:0", ranks=1)
MIXED = layout("data_parallel", "row_wise", ranks=1)


@pytest.fixture(autouse=True)
def alone(group: None) -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("nest", some_of([*NESTS, *ALONE], 0, 6, 10, 14))
def test_every_nest_comes_back(tmp_path: Path, nest: str) -> None:
    assert goes_on(str(tmp_path), [{"layout": MIXED, "nest": nest}]) == []


@pytest.mark.parametrize("number", some_of(range(len(SCHEDULES) - 1), 1, 2, 6))
def test_schedulers_come_back(tmp_path: Path, number: int) -> None:
    case = {
        "layout": TABLES,
        "nest": ("combined", "averaging")[number % 2],
        "schedule": [name for name in SCHEDULES if name != "none"][number],
        "scheduled": ("outer", "wrapper", "inner")[number % 3],
        "factory": ("momentum", "adamw", "adam")[(number + number // 3) % 3],
        "scheduler_first": number % 2 == 1,
    }
    assert goes_on(str(tmp_path), [case]) == []


Wrap = Any
_WRAPPERS: dict[str, Wrap] = {"clip": clip, "averaging": Averaging, "warm": warm}


def nested(optimizer: KeyedOptimizer, names: list[str], where: str) -> KeyedOptimizer:
    for number, name in enumerate(names):
        wrapped = warm(optimizer, f"__{where}{number}") if name == "warm" else None
        optimizer = wrapped or _WRAPPERS[name](optimizer)
    return optimizer


@settings(
    max_examples=3,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    layers=st.tuples(*[st.lists(st.sampled_from(sorted(_WRAPPERS)), max_size=3)] * 3),
    factory=st.sampled_from(sorted(FACTORIES)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    over_all=st.booleans(),
)
def test_random_nests_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    layers: tuple[list[str], list[str], list[str]],
    factory: str,
    schedule: str,
    over_all: bool,
) -> None:
    inner, outer = (layers[0], layers[1]), layers[2]
    NESTS["any"] = lambda f, d: nested(
        both(nested(f, inner[0], "f"), nested(d, inner[1], "d")), outer, "o"
    )
    case = {"layout": TABLES, "nest": "any", "factory": factory, "over_all": over_all}
    if "warm" not in {*inner[0], *inner[1], *outer}:  # the warm-up sets the rate itself
        case["schedule"] = schedule
    try:
        assert goes_on(str(tmp_path_factory.mktemp("any")), [case]) == []
    finally:
        del NESTS["any"]


def test_optimizer_over_all_parameters_gets_no_state_of_tables(tmp_path: Path) -> None:
    run = Run(TABLES, "combined", over_all=True)
    with run.checkpointer(str(tmp_path), dense="whole") as saver:
        run.train(2)
        saver.save()
        run.train(1)
        before = saver.save()
    again = Run(TABLES, "combined", over_all=True, seed=3)
    with again.checkpointer(str(tmp_path)) as saver:
        assert saver.restore() is not None
        dense = again.optimizer.optimizers[1][1]._optimizer
        shapes = {tuple(p.shape) for p in dense.state}
        assert not shapes & {(29, 8), (24, 8)}
        again.train(1)
        after = saver.save()
    assert before is not None
    assert after is not None
    assert after.bytes["dense"] == before.bytes["dense"]


def test_groups_without_a_scheduler(tmp_path: Path) -> None:
    """Make the scheduler after the restore, as torch's ``last_epoch`` requires."""
    run = Run(TABLES, "combined", schedule="step")
    run.train(5)
    groups = [dict(group, params=None) for group in run.optimizer.param_groups]
    with run.checkpointer(str(tmp_path)) as saver:
        saver.save()
    again = Run(TABLES, "combined", seed=3)
    with again.checkpointer(str(tmp_path)) as saver:
        assert saver.restore() is not None
    assert [dict(group, params=None) for group in again.optimizer.param_groups] == groups
    again.scheduler = lr_scheduler.StepLR(again.optimizer, 2, 0.5, last_epoch=5)
    assert again.scheduler.base_lrs == run.scheduler.base_lrs


@pytest.mark.parametrize("added", [False, True])
def test_plain_optimizer_with_a_scheduler_on_its_wrapper(tmp_path: Path, added: bool) -> None:
    """Keep the optimizer's dicts the same objects, which wrapper and scheduler hold."""

    def make(seed: int) -> tuple[Run, Any, Any]:
        run = Run(TABLES, "combined", schedule="lambda", scheduled="wrapper", seed=seed)
        wrapper: Any = run.optimizer.optimizers[1][1]
        if added:
            weight = torch.nn.Parameter(torch.ones(3))
            wrapper._optimizer.add_param_group({"params": [weight], "lr": 0.4, "note": "x"})
            run.scheduler = lr_scheduler.LambdaLR(wrapper, lambda n: 1 / (2 + n))
        return run, wrapper, wrapper._optimizer

    def checkpointer(run: Run, inner: Any) -> Any:

        state = {"inner": inner, "scheduler": run.scheduler, "job": run.job}
        return Checkpointer(str(tmp_path), model=run.job.model, state=state)

    run, _, inner = make(0)
    run.train(3)
    with checkpointer(run, inner) as saver:
        saver.save()
    again, wrapper, inner_again = make(3)
    groups, state = inner_again.param_groups, inner_again.state
    first = groups[0]
    with checkpointer(again, inner_again) as saver:
        assert saver.restore() is not None
    assert inner_again.param_groups is groups is wrapper.param_groups
    assert inner_again.state is state is wrapper.state
    assert groups[0] is first
    for either in (run, again):
        either.train(2)
    dense = {k: v for k, v in again.live().items() if "scheduler" in k or "[1][1]" in k}
    wanted = {k: v for k, v in run.live().items() if k in dense}
    assert differences(dense, wanted) == []


def test_a_wrapper_with_counters_must_be_there(tmp_path: Path) -> None:
    run = Run(TABLES, "warm combined")
    run.train(3)
    with run.checkpointer(str(tmp_path)) as saver:
        saver.save()
    for nest in ("combined", "warm in warm"):
        other = Run(TABLES, nest, seed=3)
        with other.checkpointer(str(tmp_path)) as saver:
            before = other.live()
            with pytest.raises(IncompatibleCheckpoint, match=r"__warmup.*WarmupOptimizer.*strict"):
                saver.restore()
            assert differences(other.live(), before) == []
            assert saver.restore(strict=False) is not None


def test_the_constructors_arguments_come_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, again = (Run(TABLES, "warm each", seed=seed) for seed in (0, 3))
    clipping: Any = run.optimizer.optimizers[1][1]
    other: Any = again.optimizer.optimizers[1][1]
    other._max_gradient = 7.0
    with run.checkpointer(str(tmp_path)) as saver:
        saver.save()
    with again.checkpointer(str(tmp_path)) as saver, caplog.at_level(logging.WARNING):
        assert saver.restore() is not None
    assert other._max_gradient == clipping._max_gradient == 0.3
    (line,) = (r.getMessage() for r in caplog.records if "_max_gradient" in r.getMessage())
    assert "0.3" in line
    assert "7.0" in line
    assert "_step_num" not in caplog.text


def test_moments_keep_their_precision(tmp_path: Path) -> None:
    """Keep fp32 state of bf16 parameters, which torch's ``load_state_dict`` casts to bf16."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def optimizer() -> Any:
        made = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        made.state[weight]["momentum_buffer"] = torch.full((4,), 1 / 3)
        return made

    run = Run(TABLES, "combined")
    first, second = optimizer(), optimizer()
    second.state[weight]["momentum_buffer"].zero_()
    with Checkpointer(str(tmp_path), model=run.job.model, state={"o": first}) as saver:
        saver.save()
    with Checkpointer(str(tmp_path), model=run.job.model, state={"o": second}) as saver:
        assert saver.restore() is not None
    assert torch.equal(second.state[weight]["momentum_buffer"], torch.full((4,), 1 / 3))


def test_infinite_hyperparameters_come_back(tmp_path: Path) -> None:
    run, again = (Run(TABLES, "combined", seed=seed) for seed in (0, 3))
    for kernel in kernels(run.job.model):
        kernel.optimizer_args = kernel.optimizer_args._replace(max_norm=float("inf"))
    with run.checkpointer(str(tmp_path)) as saver:
        saver.save()
    with again.checkpointer(str(tmp_path)) as saver:
        assert saver.restore() is not None
    assert {kernel.optimizer_args.max_norm for kernel in kernels(again.job.model)} == {float("inf")}


@pytest.mark.parametrize("nest", ["warm each", "combined warm"])
def test_checkpoints_of_dcp_save_and_for_dcp_load(tmp_path: Path, nest: str) -> None:
    """Exchange the part of a warm-up that TorchRec's state dicts show with plain DCP."""
    run = Run(TABLES, nest)
    run.train(3)
    dcp.save(
        {"model": run.job.model, "optimizer": run.optimizer},
        planner=SavePlanner(track(run.job.model)),
        storage_writer=StorageWriter(str(tmp_path / "run" / "one")),
    )
    again = Run(TABLES, nest, seed=3)
    with Checkpointer(
        str(tmp_path / "run"), model=again.job.model, state={"optimizer": again.optimizer}
    ) as saver:
        assert saver.restore() is not None
        assert warm_up(again) == warm_up(run) != []
        report = saver.save()
    assert report is not None
    other = Run(TABLES, nest, seed=4)
    other.train(1)  # dcp.load needs existing state
    dcp.load(
        {"model": other.job.model, "optimizer": other.optimizer},
        planner=LoadPlanner(track(other.job.model)),
        storage_reader=StorageReader(str(tmp_path / "run" / report.id)),
    )
    assert warm_up(other) == warm_up(run)


def warm_up(run: Run) -> list[tuple[Any, float]]:
    return [
        (run.optimizer.state_dict()["state"][name]["warmup"].tolist(), group["lr"])
        for name in run.optimizer.params
        if "__warmup" in name
        for group in run.optimizer.param_groups
    ]


def test_references_stay(tmp_path: Path) -> None:
    """Keep lists of parameters, which are no state, even if one was empty when saved."""
    run, again = (Run(TABLES, "averaging", seed=seed) for seed in (0, 3))
    saved, live = cast("Averaging", run.optimizer), cast("Averaging", again.optimizer)
    saved.first.clear()
    parameters = list(live.first)
    with run.checkpointer(str(tmp_path)) as saver:
        saver.save()
    with again.checkpointer(str(tmp_path)) as saver:
        assert saver.restore() is not None
    assert list(map(id, live.first)) == list(map(id, parameters)) != []


def test_what_a_wrapper_holds_that_is_not_saved_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(TABLES, "averaging")
    vars(run.optimizer)["dice"] = random.Random(0)
    with run.checkpointer(str(tmp_path)) as saver, caplog.at_level(logging.WARNING):
        saver.save()
        run.train(1)
        saver.save()
    lines = [record.getMessage() for record in caplog.records if "dice" in record.getMessage()]
    assert len(lines) == 1
    assert "Averaging.dice, a Random" in lines[0]
