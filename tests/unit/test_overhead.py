"""Check what failures cost: the paper's figures, optima against a search, failures at random."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipes.figures.failing_job import Outcome, Play
from tests.examples import some_of
from torchrec_checknrun.overhead import (
    FIRST_ORDER,
    JOURNAL,
    FailingJob,
    Recovery,
    best_interval,
    choose,
    cost,
)

CPR = FailingJob(
    job_hours=56,
    mtbf_hours=28,
    ranks=8,
    save_seconds=300,
    load_seconds=300,
    restart_seconds=300,
)
LONG = replace(CPR, job_hours=5600)

JOBS = st.builds(
    FailingJob,
    job_hours=st.floats(100, 10_000),
    mtbf_hours=st.floats(10, 1000),
    ranks=st.integers(2, 1000),
    save_seconds=st.floats(0.01, 3600),
    load_seconds=st.floats(0, 3600),
    restart_seconds=st.floats(0, 3600),
    durable_seconds=st.floats(0, 3600),
    lost_ranks=st.integers(1, 2),
    lost_load_seconds=st.none() | st.floats(0, 3600),
    process_deaths=st.floats(0, 1),
    journal=st.floats(0, 0.1),
)
BUDGETS = st.floats(0, 1)
KINDS = st.sampled_from(Recovery)


def by_kind(job: FailingJob, max_pls: float) -> dict[Recovery, Any]:
    return {one.recovery: one for one in choose(job, max_pls).candidates}


def test_the_papers_cluster_by_hand() -> None:
    found = by_kind(CPR, 0.1)
    save, failures = 5 / 60, 1 / 28  # hours; in an hour
    interval = math.sqrt(2 * save / failures)
    assert found[Recovery.FULL].interval_hours == pytest.approx(interval)
    full = save / interval + (interval / 2 + save + save) * failures
    assert found[Recovery.FULL].overhead == pytest.approx(full)
    assert 0.082 < full < 0.085  # the paper's
    naive = save / interval + (save / 8 + save) * failures
    assert found[Recovery.NAIVE].overhead == pytest.approx(naive)
    assert found[Recovery.NAIVE].pls == pytest.approx(0.5 * interval * failures / 8)
    assert found[Recovery.PARTIAL].interval_hours == pytest.approx(2 * 0.1 * 8 * 28)
    partial = save / 44.8 + (save / 8 + save) * failures
    assert found[Recovery.PARTIAL].overhead == pytest.approx(partial)
    assert found[Recovery.PARTIAL].pls == pytest.approx(0.1)
    assert list(found) == [Recovery.FULL, Recovery.NAIVE, Recovery.PARTIAL]  # no images: no death
    assert choose(CPR, 0.1).best.recovery is Recovery.PARTIAL


def test_images_by_hand() -> None:
    job = replace(CPR, process_deaths=0.9, journal=0.01, durable_seconds=600)
    found = by_kind(job, 0.1)
    save, failures = 5 / 60, 1 / 28
    losses = 0.1 * failures
    full = found[Recovery.IMAGES_FULL]
    interval = math.sqrt(2 * save / losses)
    assert full.interval_hours == pytest.approx(interval)
    assert full.lost == pytest.approx((interval / 2 + 1 / 6) * losses)
    assert full.recovering == pytest.approx(save * failures + save * losses)
    assert full.journal == 0.01
    partial = found[Recovery.IMAGES_PARTIAL]
    assert partial.interval_hours == 56  # the budget allows 445 hours
    assert partial.pls == pytest.approx((28 + 1 / 6) * losses / 8)
    assert partial.recovering == pytest.approx(save * failures + save / 8 * losses)
    assert partial.overhead == pytest.approx(save / 56 + partial.recovering + 0.01)


def test_nothing_is_lost_where_only_processes_die() -> None:
    found = by_kind(replace(CPR, process_deaths=1.0), 0.0)
    for kind in (Recovery.IMAGES_FULL, Recovery.IMAGES_PARTIAL):
        assert (found[kind].lost, found[kind].pls) == (0.0, 0.0)
        assert found[kind].interval_hours == CPR.job_hours
        assert found[kind].recovering == CPR.restart_hours / CPR.mtbf_hours


@given(JOBS, KINDS, BUDGETS)
def test_no_other_interval_is_better(job: FailingJob, kind: Recovery, max_pls: float) -> None:
    """Search intervals finely: none within the budget costs less."""
    found = cost(job, kind, best_interval(job, kind, max_pls), max_pls)
    others = np.geomspace(job.least_interval_hours, job.job_hours, 2000).clip(
        job.least_interval_hours, job.job_hours
    )
    costs = [cost(job, kind, float(hours), max_pls) for hours in others]
    allowed = [one.overhead for one in costs if one.allowed]
    if kind is Recovery.NAIVE:  # by definition at full recovery's interval
        assert found.interval_hours == best_interval(job, Recovery.FULL, max_pls)
    elif found.allowed:
        assert found.overhead <= min(allowed, default=math.inf) * (1 + 1e-9)
    else:
        assert not allowed


@given(JOBS, BUDGETS)
def test_the_choice_is_the_cheapest_that_is_allowed(job: FailingJob, max_pls: float) -> None:
    choice = choose(job, max_pls)
    assert choice.best.allowed
    assert choice.best.pls <= max_pls * (1 + 1e-9)
    for one in choice.candidates:
        assert one.allowed == (one.pls <= max_pls * (1 + 1e-9))
        assert not one.allowed or choice.best.overhead <= one.overhead
        assert job.least_interval_hours <= one.interval_hours <= job.job_hours
        assert one.recovery.partial or one.pls == 0
        assert one.lost == 0 or not one.recovery.partial
        released = (Recovery.FULL, Recovery.IMAGES_FULL, Recovery.IMAGES_PARTIAL)
        assert one.recovery.in_this_release == (one.recovery in released)


@given(JOBS, BUDGETS, BUDGETS)
def test_a_larger_budget_never_costs_more(job: FailingJob, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert choose(job, high).best.overhead <= choose(job, low).best.overhead * (1 + 1e-9)


@pytest.mark.parametrize(
    "worse",
    [
        {"mtbf_hours": 0.5},
        {"save_seconds": 2.0},
        {"load_seconds": 2.0},
        {"restart_seconds": 2.0},
        {"journal": 2.0},
    ],
    ids=str,
)
@given(JOBS, BUDGETS)
def test_worse_conditions_never_cost_less(
    worse: dict[str, float], job: FailingJob, max_pls: float
) -> None:
    ((name, factor),) = worse.items()
    try:
        changed = replace(job, **{name: getattr(job, name) * factor})
    except ValueError:
        assume(False)
    before, after = by_kind(job, max_pls), by_kind(changed, max_pls)
    for kind in (Recovery.FULL, Recovery.IMAGES_FULL):
        if kind in before:
            assert after[kind].overhead >= before[kind].overhead * (1 - 1e-9)


@given(JOBS, BUDGETS)
def test_more_process_deaths_make_images_better(job: FailingJob, max_pls: float) -> None:
    assume(job.process_deaths > 0)
    less = replace(job, process_deaths=job.process_deaths / 2)
    before, after = by_kind(less, max_pls), by_kind(job, max_pls)
    if Recovery.IMAGES_FULL in before:
        full = Recovery.IMAGES_FULL
        assert after[full].overhead <= before[full].overhead * (1 + 1e-9)
    assert after[Recovery.FULL] == before[Recovery.FULL]  # without images they don't matter


def test_no_stale_rows_means_full_recovery() -> None:
    choice = choose(replace(CPR, process_deaths=0.5), 0.0)
    assert choice.best.recovery is Recovery.IMAGES_FULL
    assert [one.recovery for one in choice.candidates if one.allowed] == [
        Recovery.FULL,
        Recovery.IMAGES_FULL,
    ]


def test_a_budget_that_slow_checkpoints_exceed() -> None:
    """Expect full recovery: even one save after the other leaves rows too stale."""
    job = replace(CPR, durable_seconds=5 * 3600)
    assert not by_kind(job, 0.01)[Recovery.PARTIAL].allowed
    assert choose(job, 0.01).best.recovery is Recovery.FULL
    assert choose(job, 0.01).best.interval_hours == 5  # one at a time, though Young's is shorter


def test_a_machine_of_several_ranks_loses_more() -> None:
    one, four = (by_kind(replace(CPR, lost_ranks=lost), 0.1)[Recovery.PARTIAL] for lost in (1, 4))
    assert four.interval_hours == pytest.approx(one.interval_hours / 4)
    assert four.pls == pytest.approx(one.pls)
    assert four.recovering > one.recovering
    slow = replace(CPR, lost_load_seconds=300.0)
    assert by_kind(slow, 0.1)[Recovery.PARTIAL].recovering == pytest.approx(2 * 5 / 60 / 28)


WRONG = [
    ({"job_hours": 0}, "job_hours must be from 1e-09"),
    ({"job_hours": math.nan}, "job_hours must be from 1e-09"),
    ({"mtbf_hours": -1}, "mtbf_hours must be from 1e-09"),
    ({"mtbf_hours": math.inf}, "mtbf_hours must be from 1e-09"),
    ({"ranks": 0}, "ranks must be from 1 "),
    ({"save_seconds": -1}, "save_seconds must be from 0"),
    ({"save_seconds": math.nan}, "save_seconds must be from 0"),
    ({"load_seconds": -0.1}, "load_seconds must be from 0"),
    ({"restart_seconds": math.inf}, "restart_seconds must be from 0"),
    ({"durable_seconds": math.nan}, "durable_seconds must be from 0"),
    ({"lost_load_seconds": -1}, "lost_load_seconds must be from 0"),
    ({"process_deaths": 1.1}, "process_deaths must be a share"),
    ({"process_deaths": math.nan}, "process_deaths must be a share"),
    ({"journal": -0.1}, "journal must be a share"),
    ({"lost_ranks": 0}, "from 1 to the 8 ranks"),
    ({"lost_ranks": 9}, "from 1 to the 8 ranks"),
    ({"save_seconds": 0}, "both 0"),
    ({"save_seconds": 1e-320}, "both 0"),
    ({"mtbf_hours": 0.1}, "no progress"),
    ({"mtbf_hours": 1 / 6}, "no progress"),
    ({"save_seconds": 57 * 3600}, "longer than the job of 56"),
    ({"durable_seconds": 57 * 3600}, "longer than the job of 56"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CPR, **change)


@pytest.mark.parametrize("max_pls", [-0.1, 1.1, math.nan, math.inf])
def test_no_such_budget(max_pls: float) -> None:
    with pytest.raises(ValueError, match="max_pls must be a portion from 0 to 1, not"):
        choose(CPR, max_pls)


@pytest.mark.parametrize("hours", [0.0, -1.0, 56.1, math.nan, math.inf])
def test_no_such_interval(hours: float) -> None:
    with pytest.raises(ValueError, match="within the job of 56 hours"):
        cost(CPR, Recovery.FULL, hours)


def test_zero_times_are_allowed() -> None:
    job = replace(CPR, save_seconds=0, load_seconds=0, restart_seconds=0, durable_seconds=1)
    full = by_kind(job, 0.1)[Recovery.FULL]
    assert full.interval_hours == job.durable_hours
    assert (full.saving, full.recovering) == (0, 0)
    assert full.lost == pytest.approx(1.5 / 3600 / 28)


def test_at_its_limits_all_is_finite() -> None:
    tried = 0
    for hours, mtbf, ranks, seconds, deaths, max_pls in itertools.product(
        [1e-9, 1.0, 1e18],
        [1e-9, 1.0, 1e18],
        [1, 10**18],
        [0.0, 1e-9, 1.0, 1e18],
        [0.0, 1e-300, 1e-9, 1 - 1e-16, 1.0],
        [0.0, 1e-320, 1e-9, 1.0],
    ):
        try:
            job = FailingJob(hours, mtbf, ranks, seconds, 0, 0, seconds, process_deaths=deaths)
        except ValueError:
            continue
        for one in choose(job, max_pls).candidates:
            tried += 1
            values = [one.interval_hours, one.saving, one.lost, one.recovering, one.pls]
            assert all(map(math.isfinite, [*values, one.overhead])), job
    assert tried > 1000


def emulate(
    job: FailingJob, kind: Recovery, interval: float, count: int
) -> tuple[np.ndarray, np.ndarray, list[Outcome]]:
    """Return overheads and PLS of jobs that fail at random, without the journal."""
    outcomes = [Play(job, kind, interval, Random(n)).run() for n in range(count)]
    spent = [o.saving + o.lost + o.recovering for o in outcomes]
    return np.array(spent) / job.job_hours, np.array([o.pls for o in outcomes]), outcomes


@pytest.mark.parametrize("kind", Recovery)
def test_random_failures_cost_what_the_closed_form_says(kind: Recovery) -> None:
    """Expect 5 % at most, first-order arithmetic and four standard errors included."""
    job = replace(LONG, process_deaths=0.5, durable_seconds=60)
    expected = cost(job, kind, best_interval(job, kind, 0.05), 0.05)
    spent, lost, outcomes = emulate(job, kind, expected.interval_hours, 200)
    error = 4 * spent.std() / len(spent) ** 0.5
    assert error < 0.03 * expected.overhead
    assert spent.mean() == pytest.approx(expected.overhead, rel=0.05)
    failures = np.array([outcome.failures for outcome in outcomes])
    # As often as the clock runs, which is a little longer than the training.
    running = job.job_hours * (1 + expected.saving + expected.lost) / job.mtbf_hours
    assert failures.mean() == pytest.approx(running, abs=4 * (running / len(failures)) ** 0.5)
    if kind.partial:
        assert 4 * lost.std() / len(lost) ** 0.5 < 0.08 * expected.pls
        assert lost.mean() == pytest.approx(expected.pls, rel=0.08)
    else:
        assert not lost.any()


@pytest.mark.parametrize(
    ("mtbf_hours", "save", "load", "restart", "durable"),
    some_of(
        [
            (16.8, 300, 0, 0, 0),
            (21.5, 300, 300, 300, 300),
            (2.01, 1, 300, 300, 0),
            (2.55, 1, 0, 0, 600),
            (22.9, 300, 0, 0, 1200),
            (6.15, 1, 0, 2000, 0),
        ],
        1,
    ),
)
def test_how_frequent_failures_may_be(
    mtbf_hours: float, save: float, load: float, restart: float, durable: float
) -> None:
    """Compare full recovery, the least exact kind, at the overhead up to which it is trusted."""
    job = FailingJob(200 * mtbf_hours, mtbf_hours, 8, save, load, restart, durable)
    full = by_kind(job, 0.0)[Recovery.FULL]
    assert 0.99 * FIRST_ORDER < full.overhead <= FIRST_ORDER
    spent, _, _ = emulate(job, Recovery.FULL, full.interval_hours, 200)
    assert 3 * spent.std() / len(spent) ** 0.5 < 0.02 * full.overhead
    assert 1 < spent.mean() / full.overhead < 1.08


def test_beyond_it_is_a_lower_bound() -> None:
    job = replace(CPR, mtbf_hours=0.5, job_hours=100)
    full = by_kind(job, 0.0)[Recovery.FULL]
    assert full.overhead > FIRST_ORDER
    spent, _, _ = emulate(job, Recovery.FULL, full.interval_hours, 100)
    assert spent.mean() > 1.2 * full.overhead


def test_lost_samples_are_the_formulas() -> None:
    """Compare 3 % on long jobs: 40,000 failures, each uniform within its interval."""
    expected = by_kind(LONG, 0.1)[Recovery.PARTIAL]
    _, lost, _ = emulate(LONG, Recovery.PARTIAL, expected.interval_hours, 200)
    assert 2 * lost.std() / len(lost) ** 0.5 < 0.03 * 0.1
    assert lost.mean() == pytest.approx(0.1, rel=0.03)


def test_a_job_without_failures_only_saves() -> None:
    job = replace(CPR, mtbf_hours=1e9)
    (spent,), (lost,), (outcome,) = emulate(job, Recovery.FULL, 8.0, 1)
    assert (outcome.failures, lost) == (0, 0)
    assert outcome.saving == pytest.approx(6 * 300 / 3600)  # none at the end, after 56 hours
    assert spent == pytest.approx(outcome.saving / 56)


def test_failures_by_hand() -> None:
    """Fail after 5 hours: saves at 2 and 4, the second of which counts only after 5."""

    class Given(Random):
        after: list[float]

        def expovariate(self, lambd: float = 1.0) -> float:
            return self.after.pop(0) if self.after else 1e9

    def play(kind: Recovery, durable: float, *more: float) -> Outcome:
        source = Given()
        source.after = [5.0, *more]
        job = FailingJob(10, 100, 4, 360, 720, 1440, durable * 3600, process_deaths=1.0)
        return Play(job, kind, 2.0, source).run()

    slow = play(Recovery.FULL, 1.5)
    # 5 hours of the clock are 4.8 of training; the checkpoint of hour 2 counts.
    assert slow.lost == pytest.approx(2.8)
    assert slow.recovering == pytest.approx(0.2 + 0.4)
    # Saves at 2, 4, and again at 4, 6, 8: none at the end.
    assert slow.saving == pytest.approx(0.5)
    fast = play(Recovery.FULL, 0.5)
    assert fast.lost == pytest.approx(0.8)
    stale = play(Recovery.PARTIAL, 1.5)
    assert stale.lost == 0
    assert stale.pls == pytest.approx(2.8 / (10 * 4))
    assert stale.recovering == pytest.approx(0.2 / 4 + 0.4)
    # An hour after the recovery again: the save of hour 4 ended with its process.
    again = play(Recovery.PARTIAL, 1.5, 1.0)
    assert again.failures == 2
    assert again.pls == pytest.approx((2.8 + 3.8) / (10 * 4))
    image = play(Recovery.IMAGES_FULL, 1.5)
    assert (image.lost, image.pls, image.failures) == (0, 0, 1)
    assert image.recovering == pytest.approx(0.4)


def test_the_cost_of_images_is_the_measured_one() -> None:
    results = json.loads(Path("recipes/results/images.json").read_text())["results"]
    shares = [one["share"][0] for one in results]
    assert min(shares) - 0.005 <= JOURNAL <= max(shares) + 0.005
