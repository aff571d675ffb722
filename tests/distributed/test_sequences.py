"""In any sequence of operations no row is lost, and all who should hear of a failure do.

Hypothesis makes the sequences, which real processes run, life by life; every answer is
compared with a reference model's, every restored state with a copy that was taken when its
checkpoint was begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.sequence_model import Life, Point, Way
from tests.distributed.sequence_run import ALPHABET, FREE, OF_LINKS, Run, Workers
from tests.distributed.sequence_sabotage import DECIDES_WRONGLY, LOSES_PROTECTION, LOSES_ROWS
from tests.distributed.worker_pool import CaseFailed
from tests.examples import ALL, some_of

quick = settings(
    derandomize=True,
    database=None,
    deadline=None,
    stateful_step_count=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check_sequences(
    workers: Workers,
    many: int,
    start: int,
    ends: Sequence[str] = ("abandon", "close"),
    backgrounds: Sequence[str] = ("thread",),
    linked: bool = False,
) -> Counter[str]:
    """Run sequences; count what has happened in them.

    Args:
        start: where Hypothesis begins: the same sequences every time.
        linked: every life stores rows as differences.
    """
    seen: Counter[str] = Counter()

    @seed(start)
    class OneOfMany(Run):
        def __init__(self) -> None:
            super().__init__(workers, ends, backgrounds, seen, linked=linked)

    run_state_machine_as_test(OneOfMany, settings=settings(quick, max_examples=many))
    print(dict(sorted(seen.items())))
    return seen


@pytest.mark.timeout(900)
def test_nothing_is_lost(workers: Workers) -> None:
    seen = check_sequences(workers, *((14, 102) if ALL else (4, 30)))
    share = 1 if ALL else 1 / 8
    # Neither kind is rare; lives that don't restore begin with a full one.
    assert seen["differential"] > 40 * share
    assert seen["full"] > 10 * share
    assert seen["link"] > 10 * share
    # Rows are copied on write in a good share of saves. How often training overwrites some of them
    # meanwhile depends on the machine: few sequences may lack it, which the overwriting one has.
    assert seen["copied on write"] > 15 * share
    assert seen["protected"] > 3 or not ALL


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_is_lost_long(workers: Workers) -> None:
    ends = (*("abandon", "close") * 4, "kill", "kill later")
    backgrounds = (*("thread",) * 5, "process")
    seen = check_sequences(workers, 200, 2, ends, backgrounds)
    alphabet = ALPHABET | {"background: process", "end: kill", "end: kill later"}
    assert {what for what in alphabet if not seen[what]} == set()
    assert min(seen["differential"], seen["full"]) > 30


@pytest.mark.timeout(900)
def test_no_link_is_lost(workers: Workers) -> None:
    seen = check_sequences(workers, *((12, 3) if ALL else (2, 39)), linked=True)
    assert seen["link"] > (30 if ALL else 3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_link_is_lost_long(workers: Workers) -> None:
    ends = (*("abandon", "close") * 4, "kill", "kill later")
    seen = check_sequences(workers, 80, 7, ends, linked=True)
    assert {what for what in OF_LINKS | {"end: kill"} if not seen[what]} == set()
    assert min(seen["link: delta"], seen["link: logdelta"], seen["link: lc"]) > 20


def go_through(run: Run) -> None:
    """Run a short sequence that has all in it that ``LOSES_ROWS`` breaks."""
    run.begin_run(11, Life(policy="consecutive", staging="copy"), background=0)
    run.save(2, FREE)
    run.save(2, Way(fault=Point.FILE, fault_rank=1))
    run.save_in_the_background(1, Way(Point.FILE), meanwhile=2)
    run.restart(1, FREE, Life(policy="one_shot"), background=0, newest=True, which=0)
    run.save(1, FREE)
    run.teardown()


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_short_sequence(workers: Workers, background: str) -> None:
    go_through(Run(workers, backgrounds=(background,)))


@pytest.mark.parametrize("sabotage", sorted(LOSES_ROWS))
def test_a_lost_row_is_found(workers: Workers, sabotage: str) -> None:
    with pytest.raises(AssertionError, match=r"rows .* differ"):
        go_through(Run(workers, sabotage=sabotage))


SCHEMES: dict[str, dict[str, Any]] = {
    "delta": {"links": "delta"},
    "logdelta": {"links": "delta", "log_state": True},
    "lc": {"links": "lc", "lc_bits": 3},
}
"""By method: a life's choices."""


def link(run: Run, method: str = "logdelta") -> None:
    """Run a short sequence of links: with failures, told to one rank only, on other ranks."""
    scheme = SCHEMES[method]
    run.begin_run(11, Life(**scheme, staging="copy"), background=0)
    run.spec = ModelSpec((CollectionSpec("c", (TableSpec("t", 300, 8, ("f0", "f1")),)),))
    run.save(2, FREE)
    run.save(2, Way(fault=Point.FILE, fault_rank=1))
    run.save_in_the_background(1, Way(Point.FILE), meanwhile=2)
    run.restart(1, FREE, Life(1, **scheme), background=0, newest=True, which=0)
    run.evict(3)
    run.save(1, FREE)
    run.save(1, Way(fault=Point.COMMITTED))
    run.restart(1, FREE, Life(**scheme), background=0, newest=True, which=0)
    run.save(1, Way(fault=Point.HEARD, fault_rank=1))
    run.save(1, FREE)
    run.save(1, FREE)
    for other in ("lc" if method == "delta" else "delta", method):
        life = Life(**SCHEMES[other])  # another scheme begins with a base
        run.restart(1, FREE, life, background=0, newest=True, which=0)
        run.save(1, FREE)
        run.save(1, FREE)
    run.teardown()


@pytest.mark.parametrize("method", some_of(SCHEMES, 1, 2))
def test_links(workers: Workers, method: str) -> None:
    run = Run(workers)
    link(run, method)
    assert run.seen["link"] >= 3


# A link holds the rows modified since the last checkpoint: marks since the baseline don't count.
@pytest.mark.parametrize("method", some_of(SCHEMES, 1, 2))
@pytest.mark.parametrize("sabotage", sorted({*LOSES_ROWS} - {"marks since the baseline are lost"}))
def test_a_row_that_links_lose_is_found(workers: Workers, sabotage: str, method: str) -> None:
    with pytest.raises(AssertionError, match=r"rows .* differ"):
        link(Run(workers, sabotage=sabotage), method)


def overwrite(run: Run) -> None:
    """Train while the rows of a save are copied: two tables, two features of the first."""
    run.begin_run(11, Life(policy="consecutive"), background=0)
    tables = (TableSpec("t0", 60, 8, ("f0", "f1")), TableSpec("t1", 40, 8, ("f1",)))
    run.spec = ModelSpec((CollectionSpec("c", tables),))
    run.save(2, FREE)
    run.save_in_the_background(3, FREE, meanwhile=4)
    run.restart(1, FREE, Life(1), background=0, newest=True, which=0)
    run.teardown()


def test_rows_are_overwritten_while_they_are_copied(workers: Workers) -> None:
    run = Run(workers, sabotage="the background is held back")  # which is harmless
    overwrite(run)
    assert run.seen["copied on write"] >= 2
    assert run.seen["protected"] >= 1


def test_a_restore_while_rows_are_copied(workers: Workers) -> None:
    """Restore while a save is held whose rows are not copied yet: it is committed all the same."""
    run = Run(workers)
    run.begin_run(11, Life(policy="consecutive"), background=0)
    run.spec = ModelSpec((CollectionSpec("c", (TableSpec("t0", 300, 8, ("f0", "f1")),)),))
    run.save(2, FREE)
    run.train(8)
    run.save_in_the_background(2, Way(hold=Point.FILE), meanwhile=0)
    run.restore(newest=True, which=0)
    run.save(1, FREE)
    run.teardown()


@pytest.mark.parametrize("sabotage", some_of(sorted(LOSES_PROTECTION), 0, 1, 3, 5))
def test_lost_protection_is_found(workers: Workers, sabotage: str) -> None:
    # Ranks that are ahead of each other copy other dense values, which the save itself refuses.
    found = r"rows .* differ|state '\w+' .* differs between rank 0 and rank 1"
    with pytest.raises((AssertionError, CaseFailed), match=found):
        overwrite(Run(workers, sabotage=sabotage))


def grow(run: Run) -> None:
    """Let differential checkpoints grow until a full one pays, from one life to the next."""
    run.begin_run(11, Life(policy="intermittent"), background=0)
    run.spec = ModelSpec((CollectionSpec("c", (TableSpec("t", 300, 40, ("f0", "f1")),)),))
    for steps in (1, 1, 1):
        run.save(steps, FREE)
    run.restart(1, FREE, Life(1, policy="intermittent"), background=0, newest=True, which=0)
    for steps in (40, 1, 1):
        run.save(steps, FREE)
    run.teardown()


def test_a_full_one_when_it_pays(workers: Workers) -> None:
    run = Run(workers)
    grow(run)
    # The first, and the one after the rows of forty steps.
    assert (run.seen["full"], run.seen["differential"]) == (2, 4)


@pytest.mark.parametrize("sabotage", some_of(sorted(DECIDES_WRONGLY), 1, 2))
def test_a_wrong_predictor_is_found(workers: Workers, sabotage: str) -> None:
    with pytest.raises(AssertionError, match="is differential to"):
        grow(Run(workers, sabotage=sabotage))


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_failing_in_parts(workers: Workers, background: str) -> None:
    """Train while a failed save does not give its memory back in the ordinary way."""
    run = Run(workers, backgrounds=(background,))
    run.begin_run(256, Life(plan=39, in_parts=True), background=0)
    for rank in (None, 1):
        run.train_until_due(2, Way(fault=Point.IN_FILE, fault_rank=rank))
        run.save(1, FREE)
    run.teardown()


@pytest.mark.parametrize("rank", some_of([0, 1], 1))
def test_one_rank_does_not_hear(workers: Workers, rank: int) -> None:
    """Keep one rank from hearing, when the others have given up their marks."""
    run = Run(workers)
    run.begin_run(11, Life(policy="consecutive", plan=3), background=0)
    run.save(2, FREE)
    run.save(2, Way(fault=Point.HEARD, fault_rank=rank))
    run.save(1, FREE)
    run.save(1, FREE)
    run.teardown()


def test_one_rank_does_not_hear_before_the_end(workers: Workers) -> None:
    """Save once more at the end: that rank can't know that its rows are in a checkpoint."""
    run = Run(workers, ends=("close",))
    run.begin_run(11, Life(policy="consecutive", at_end=True), background=0)
    run.train_until_due(2, Way(fault=Point.HEARD, fault_rank=1))
    run.restart(0, FREE, Life(1, policy="consecutive"), background=0, newest=True, which=0)
    assert run.seen["at the end"] == 1
    run.teardown()


@pytest.mark.parametrize(
    ("end", "hold"),
    [
        ("kill", Point.COMMITTED),
        pytest.param("kill later", Point.FILE, marks=pytest.mark.slow),
        pytest.param("kill", Point.FILE, marks=pytest.mark.slow),
        pytest.param("kill", Point.MANIFEST, marks=pytest.mark.slow),
    ],
)
def test_killed_while_it_is_written(workers: Workers, end: str, hold: Point) -> None:
    run = Run(workers, ends=(end,))
    run.begin_run(11, Life(policy="consecutive"), background=0)
    run.save(2, FREE)
    run.save_in_the_background(1, Way(hold), meanwhile=2)
    run.restart(0, FREE, Life(1, policy="consecutive"), background=0, newest=True, which=0)
    run.save(1, FREE)
    run.teardown()
