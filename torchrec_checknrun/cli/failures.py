"""Print which kind of recovery costs a job the least, for ``plan --max-pls``.

Every figure is shown with its source: given as an option, measured in a run's log, computed from
the tables' sizes, or assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as shown
from statistics import fmean
from typing import Any

from torchrec_checknrun.cli.events import Measured, measured
from torchrec_checknrun.cli.output import print_table, say
from torchrec_checknrun.overhead import (
    FIRST_ORDER,
    JOURNAL,
    MOST,
    Candidate,
    Choice,
    FailingJob,
    choose,
)
from torchrec_checknrun.tools.forecast import Forecast

_LOAD_SECONDS = _RESTART_SECONDS = 300.0
"""Assumed where nothing is known: what fits CPR's cluster."""
_FORECAST_POLICY = "intermittent"
"""The default policy, whose stall and reading stand for a job without measurements."""


@dataclass(frozen=True)
class Given:
    """The options of ``plan`` that say what failures cost; None: not given."""

    max_pls: float | None
    ranks: int | None
    save_seconds: float | None
    durable_seconds: float | None
    load_seconds: float | None
    restart_seconds: float | None
    process_deaths: float | None
    journal: float | None
    log: Path | None

    def without_budget(self) -> str | None:
        """Return the name of an option that has no effect without ``--max-pls``."""
        given = [name for name, value in vars(self).items() if value is not None]
        if self.max_pls is not None or not given:
            return None
        return f"--{given[0].replace('_', '-')}"


@dataclass(frozen=True)
class Figure:
    """A number with its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Plan:
    """The choice for a job, and the figures it rests on."""

    job: FailingJob
    max_pls: float
    figures: dict[str, Figure]
    choice: Choice

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        best = self.choice.best
        return {
            "max_pls": self.max_pls,
            "mtbf_hours": self.job.mtbf_hours,
            "ranks": self.job.ranks,
            "lost_ranks": self.job.lost_ranks,
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "best": {"recovery": best.recovery.value, "interval_hours": best.interval_hours},
            "candidates": [
                {
                    **asdict(one),
                    "recovery": one.recovery.value,
                    "overhead": one.overhead,
                    "lower_bound": one.overhead > FIRST_ORDER,
                    "in_this_release": one.recovery.in_this_release,
                }
                for one in self.choice.candidates
            ],
        }


def plan_recovery(
    given: Given,
    forecasts: Sequence[Forecast],
    *,
    nodes: int,
    mtbf_hours: float,
    job_hours: float,
) -> Plan:
    """Choose the cheapest kind of recovery.

    Args:
        forecasts: of all policies; none where the tables' sizes are not given.
        mtbf_hours: mean time between failures of one node.

    Raises:
        ValueError: out of range, or nothing is known of the time that a save takes.
        CheckNRunError: the log is malformed.
    """
    assert given.max_pls is not None
    if not 1 <= nodes <= MOST:
        raise ValueError(f"nodes must be from 1 to {MOST:g}, not {shown(nodes)}")
    ranks = nodes if given.ranks is None else given.ranks
    known = measured(given.log) if given.log is not None else Measured()
    computed = next((one for one in forecasts if one.policy == _FORECAST_POLICY), None)
    figures = {
        **_save_figures(given, known, computed),
        "load_seconds": _load_figure(given, known, computed),
        "restart_seconds": _figure(given.restart_seconds, _RESTART_SECONDS),
        "process_deaths": _figure(given.process_deaths, 0.0),
    }
    if figures["process_deaths"].value:
        figures["journal"] = _figure(given.journal, JOURNAL, "measured on two cores")
    job = FailingJob(
        job_hours=job_hours,
        mtbf_hours=mtbf_hours / nodes,
        ranks=ranks,
        lost_ranks=max(1, -(-ranks // nodes)),
        **{name: figure.value for name, figure in figures.items()},
    )
    return Plan(job, given.max_pls, figures, choose(job, given.max_pls))


def _figure(given: float | None, otherwise: float, source: str = "assumed") -> Figure:
    return Figure(otherwise, source) if given is None else Figure(given, "given")


def _save_figures(given: Given, known: Measured, computed: Forecast | None) -> dict[str, Figure]:
    """Return how long training waits for a save, and how long until its checkpoint counts."""
    if known.save:
        source = f"measured: mean of {len(known.save)} checkpoints"
        save = _figure(given.save_seconds, fmean(known.save), source)
        return {
            "save_seconds": save,
            "durable_seconds": _figure(given.durable_seconds, fmean(known.durable), source),
        }
    if given.save_seconds is None and computed is None:
        where = f"{given.log} has no checkpoint" if given.log else "nothing says how long a save is"
        raise ValueError(
            f"{where}: give --save-seconds, a --log of a run that saved, or --rows and --dim"
        )
    stall = computed.mean_stall if computed else 0.0
    save = _figure(given.save_seconds, stall, f"computed: mean stall of {_FORECAST_POLICY}")
    durable = _figure(given.durable_seconds, save.value, "assumed: when training goes on")
    return {"save_seconds": save, "durable_seconds": durable}


def _load_figure(given: Given, known: Measured, computed: Forecast | None) -> Figure:
    if known.load:
        source = f"measured: mean of {len(known.load)} restores"
        return _figure(given.load_seconds, fmean(known.load), source)
    if computed is not None and computed.longest_read is not None:
        source = f"computed: longest chain of {_FORECAST_POLICY}"
        return _figure(given.load_seconds, computed.longest_read, source)
    return _figure(given.load_seconds, _LOAD_SECONDS)


def print_recovery(plan: Plan) -> None:
    """Print figures, candidates and the choice."""
    job = plan.job
    say(
        f"the job fails every {job.mtbf_hours:.3g} h; {job.ranks} ranks hold tables, of which a "
        f"failure takes {job.lost_ranks}; PLS at most {plan.max_pls:g}"
    )
    print_table(
        ("figure", ">value", "source"),
        [
            [name.replace("_", " "), f"{figure.value:.3g}", figure.source]
            for name, figure in plan.figures.items()
        ],
    )
    parts = (">saves", ">trained again", ">recovery", ">images", ">overhead", ">PLS", "")
    print_table(
        ("recovery", ">interval", *parts), [_row(one, plan) for one in plan.choice.candidates]
    )
    best = plan.choice.best
    say(f"cheapest: {best.recovery.value}, a save every {_hours(best.interval_hours)}")
    released = [one for one in plan.choice.candidates if one.recovery.in_this_release]
    own = min(released, key=lambda one: one.overhead)
    say(
        f"cheapest in this release: {own.recovery.value}, a save every {_hours(own.interval_hours)}"
    )


def _row(one: Candidate, plan: Plan) -> list[str]:
    parts = (one.saving, one.lost, one.recovering, one.journal, one.overhead)
    notes = []
    if one.recovery.partial and not one.recovery.keeps_images:
        notes.append("only where other ranks' processes live on")
    if not one.allowed:
        notes.append("above the budget")
    if one.overhead > FIRST_ORDER:
        notes.append("a lower bound, with failures this frequent")
    if one.interval_hours >= plan.job.job_hours:
        notes.append("one save in the whole job")
    return [
        one.recovery.value,
        _hours(one.interval_hours),
        *(f"{part:.3%}" for part in parts),
        f"{one.pls:.2g}",
        "; ".join(notes),
    ]


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{60 * hours:.3g} min" if 60 * hours >= 1 else f"{3600 * hours:.3g} s"
