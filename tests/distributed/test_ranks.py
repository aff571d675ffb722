"""Rank 0 decides for all; every rank gets its own part, or the error of the rank that failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun.errors import InvalidPlan
from torchrec_checknrun.ranks import Ranks

Workers = Callable[[int], WorkerPool]
TIMEOUT = 60.0


class Unsendable(Exception):
    """An object that can't be pickled: it holds a function of a function."""

    def __init__(self) -> None:
        super().__init__("holds a lambda")
        self.held = lambda: None


def fail(error: BaseException) -> NoReturn:
    raise error


def nothing(_: list[int]) -> None:
    """Decide nothing: only errors matter."""


def results() -> None:
    ranks = Ranks(timedelta(seconds=TIMEOUT))
    rank, world = ranks.rank, ranks.world_size
    decided: list[list[int]] = []

    def decide(values: list[int]) -> list[str]:
        decided.append(values)
        return [f"{value} of {world}" for value in values]

    assert ranks.reduce_scatter(lambda: 10 * rank, decide) == f"{10 * rank} of {world}"
    assert ranks.reduce(lambda: rank, lambda values: sum(values)) == sum(range(world))
    ranks.reduce(lambda: rank, nothing)
    assert decided == ([[10 * r for r in range(world)]] if rank == 0 else [])
    ranks.close()


def errors() -> None:
    """Raise every rank's error on every rank, before the timeout."""
    ranks = Ranks(timedelta(seconds=TIMEOUT))
    here, last = dist.get_rank(), dist.get_rank() == ranks.world_size - 1
    started = time.monotonic()
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: fail(ValueError("of the last")) if last else 1, ValueError, "of the last"),
        # The package's own error says more than one that came of it:
        (lambda: fail(InvalidPlan("why") if last else ValueError(str(here))), InvalidPlan, "why"),
        (lambda: fail(OSError(5, "why") if last else ValueError(str(here))), OSError, "why"),
        (lambda: fail(ValueError(f"of rank {here}")), ValueError, "of rank 0"),
        (lambda: fail(Unsendable()) if last else 1, RuntimeError, "holds a lambda"),
        (lambda: fail(KeyboardInterrupt("ctrl")) if last else 1, RuntimeError, "Keyboard.*ctrl"),
    ]
    for act, kind, said in cases:
        for collective in (ranks.reduce, ranks.reduce_scatter):
            with pytest.raises(kind, match=said) as raised:
                collective(act, lambda values: values)
            assert (raised.value.__cause__ is not None) == _fails(act)  # where it comes from
    for collective in (ranks.reduce, ranks.reduce_scatter):
        with pytest.raises(InvalidPlan, match="decided"):
            collective(lambda: here, lambda values: fail(InvalidPlan("decided")))
    assert time.monotonic() - started < TIMEOUT
    ranks.close()


def waiting() -> None:
    """Wait on rank 0 for a rank that doesn't come."""
    ranks = Ranks(timedelta(seconds=1))
    if ranks.rank == 0:
        with pytest.raises(RuntimeError) as raised:
            ranks.gather(0)
        assert "made on every rank" in str(getattr(raised.value, "__notes__", ()))
    dist.barrier()
    ranks.close()


def made_by_one() -> None:
    """Make the group on rank 0 only, as a program does that trains on some of its ranks."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            Ranks(timedelta(seconds=1))
        assert "on every rank" in str(getattr(raised.value, "__notes__", ()))
    dist.barrier()


def unsendable() -> None:
    """Raise on every rank what can't be sent; the ranks' next collective works."""
    ranks = Ranks(timedelta(seconds=TIMEOUT))
    last = dist.get_rank() == ranks.world_size - 1
    started = time.monotonic()
    for collective in (ranks.reduce, ranks.reduce_scatter):
        with pytest.raises(TypeError, match="a function can't be sent to other ranks"):
            collective(lambda: (lambda: None) if last else 1, lambda values: values)
        with pytest.raises(TypeError, match="a list can't be sent to other ranks"):
            collective(lambda: 1, lambda values: [lambda: None for _ in values])
        assert collective(lambda: 1, lambda values: values)
    assert time.monotonic() - started < TIMEOUT
    ranks.close()


def places() -> None:
    """Tell every rank on which rank the work failed, and where, with all that failed there."""
    ranks = Ranks(timedelta(seconds=TIMEOUT))
    here, world = ranks.rank, ranks.world_size
    collectives: tuple[Any, Any] = (ranks.reduce, ranks.reduce_scatter)
    for collective in collectives:
        with pytest.raises(InvalidPlan) as raised:
            collective(
                lambda: fail(InvalidPlan("why") if here == world - 1 else ValueError(str(here))),
                lambda values: values,
            )
        (note,) = vars(raised.value)["__notes__"]
        assert note.startswith(f"failed on rank {world - 1}:\n")
        assert "in fail\n" in note
        assert note.endswith("and on 1 others:\nrank 0: ValueError('0')")
        with pytest.raises(InvalidPlan) as raised:
            collective(lambda: here, lambda values: fail(InvalidPlan("decided")))
        (note,) = vars(raised.value)["__notes__"]
        assert note.startswith("failed on rank 0:\n")
        assert "in fail\n" in note
    ranks.close()


def _fails(act: Callable[[], Any]) -> bool:
    try:
        act()
    except BaseException:
        return True
    return False


@pytest.mark.parametrize("world", [1, 2])
def test_results(workers: Workers, world: int) -> None:
    workers(world).run(results)


def test_errors(workers: Workers) -> None:
    workers(2).run(errors)


def test_unsendable(workers: Workers) -> None:
    workers(2).run(unsendable)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_places_of_errors(workers: Workers) -> None:
    workers(2).run(places)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_call_that_not_all_ranks_make(workers: Workers) -> None:
    workers(2).run(waiting)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_a_group_that_not_all_ranks_make(workers: Workers) -> None:
    workers(2).run(made_by_one)


def test_errors_of_one_process() -> None:
    alone = Ranks.of(None)
    error = ValueError("of my own")
    with pytest.raises(ValueError, match="of my own") as raised:
        alone.reduce(lambda: fail(error), len)
    assert raised.value is error
    with pytest.raises(RuntimeError, match="SystemExit"):
        alone.reduce_scatter(lambda: fail(SystemExit(3)), list)
