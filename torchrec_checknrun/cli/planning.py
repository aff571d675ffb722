"""Define ``plan``, which forecasts the cost of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from torchrec_checknrun.cli.failures import Given, plan_recovery, print_recovery
from torchrec_checknrun.cli.output import AsJson, number, print_json, print_table, say, size
from torchrec_checknrun.tools.forecast import (
    MOST_CHECKPOINTS,
    NODE_COPY_BANDWIDTH,
    POLICIES,
    Forecast,
    Job,
    forecast,
)

_GB = 1e9


def _count(text: str) -> int:
    """Parse a large number as people write it: 2000000000 or 2e9."""
    try:
        return int(text) if text.isdigit() else int(float(text))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no number: write 2000000000 or 2e9") from None


def _exponent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--growth {text!r} is no number: write one from 0 to 1, such as 0.33, or random"
        ) from None


_Rows = Annotated[str | None, typer.Option(help="Rows of all tables, like 2e9.")]
_Dim = Annotated[int | None, typer.Option(help="Columns of the tables.")]
_OptimizerBytes = Annotated[
    int, typer.Option(help="Bytes of a row's optimizer state; 4 is row-wise Adagrad's.")
]
_DenseBytes = Annotated[str, typer.Option(help="Bytes outside the tables, in every checkpoint.")]
_Fraction = Annotated[float, typer.Option(help="Fraction of the rows modified in one interval.")]
_Growth = Annotated[
    str,
    typer.Option(
        help="Exponent of the fraction's growth over intervals; 'random': each interval modifies "
        "other rows."
    ),
]
_Interval = Annotated[float, typer.Option(help="Minutes between checkpoints.")]
_JobHours = Annotated[float, typer.Option(help="Hours of training.")]
_Nodes = Annotated[int, typer.Option(help="Nodes; the job fails when one does.")]
_MtbfHours = Annotated[float, typer.Option(help="Mean time between failures of one node.")]
_Bits = Annotated[
    int | None,
    typer.Option(help="2, 3, 4, 8, or 32 for exact; default: as expected restores allow."),
]
_CopyBandwidth = Annotated[
    float | None,
    typer.Option(
        help="GB/s at which all ranks together copy rows, for the stall; "
        f"default: {NODE_COPY_BANDWIDTH / _GB:g} a node."
    ),
]
_ReadBandwidth = Annotated[
    float | None, typer.Option(help="GB/s at which all ranks together read, for restores.")
]
_MaxPls = Annotated[
    float | None,
    typer.Option(
        help="Also compare kinds of recovery, with at most this portion of lost samples; 0: none."
    ),
]
_Ranks = Annotated[
    int | None, typer.Option(help="Ranks that hold tables; default: one a node. With --max-pls.")
]
_SaveSeconds = Annotated[
    float | None, typer.Option(help="Training waits for a save; else by --log, or by --rows.")
]
_DurableSeconds = Annotated[
    float | None, typer.Option(help="From a save's begin until its checkpoint counts.")
]
_LoadSeconds = Annotated[
    float | None, typer.Option(help="All ranks load; else by --log, --read-bandwidth, or assumed.")
]
_RestartSeconds = Annotated[
    float | None, typer.Option(help="From a failure until processes run again; else assumed.")
]
_ProcessDeaths = Annotated[
    float | None,
    typer.Option(help="Share of the failures that end processes and leave their machine's memory."),
]
_Journal = Annotated[
    float | None, typer.Option(help="Part of the training time that images take; else assumed.")
]
_Log = Annotated[
    Path | None,
    typer.Option(help="JSON lines of a run, for what its saves and restores took. With --max-pls."),
]


def plan(
    *,
    rows: _Rows = None,
    dim: _Dim = None,
    optimizer_bytes: _OptimizerBytes = Job.optimizer_bytes,
    dense_bytes: _DenseBytes = "0",
    fraction: _Fraction = Job.fraction,
    growth: _Growth = str(Job.growth),
    interval: _Interval = Job.interval_minutes,
    job_hours: _JobHours = Job.job_hours,
    nodes: _Nodes = Job.nodes,
    mtbf_hours: _MtbfHours = Job.mtbf_hours,
    bits: _Bits = None,
    copy_bandwidth: _CopyBandwidth = None,
    read_bandwidth: _ReadBandwidth = None,
    max_pls: _MaxPls = None,
    ranks: _Ranks = None,
    save_seconds: _SaveSeconds = None,
    durable_seconds: _DurableSeconds = None,
    load_seconds: _LoadSeconds = None,
    restart_seconds: _RestartSeconds = None,
    process_deaths: _ProcessDeaths = None,
    journal: _Journal = None,
    log: _Log = None,
    as_json: AsJson = False,
) -> None:
    """Forecast bytes, bandwidth, capacity, stall and width of each policy for a job; with
    --max-pls, also what failures cost by kind of recovery.
    """
    values = dict(locals())
    given = Given(**{field.name: values[field.name] for field in fields(Given)})
    _require_sizes(rows, dim, given)
    try:
        job = None if rows is None else _job(values)
        found = [] if job is None else [forecast(job, policy) for policy in POLICIES]
        recovery = None
        if given.max_pls is not None:
            recovery = plan_recovery(
                given, found, nodes=nodes, mtbf_hours=mtbf_hours, job_hours=job_hours
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        document = {} if job is None else _document(job, found)
        print_json(document | ({} if recovery is None else {"recovery": recovery.to_json()}))
        return
    if job is not None:
        _print(job, found)
    if recovery is not None:
        print_recovery(recovery)


def _require_sizes(rows: str | None, dim: int | None, given: Given) -> None:
    """Refuse a call that lacks what its forecast needs.

    Raises:
        typer.BadParameter: it does.
    """
    unused = given.without_budget()
    if unused is not None:
        raise typer.BadParameter(
            f"{unused} is for the choice of a recovery: give --max-pls as well, 0 for no stale rows"
        )
    for missing, value, other in (("--rows", rows, dim), ("--dim", dim, rows)):
        if value is None and (given.max_pls is None or other is not None):
            raise typer.BadParameter(f"{missing} is missing: bytes follow from --rows and --dim")


def _job(values: Mapping[str, Any]) -> Job:
    """Build the job from the command's options."""
    copied, read = values["copy_bandwidth"], values["read_bandwidth"]
    same = ("dim", "optimizer_bytes", "fraction", "job_hours", "nodes", "mtbf_hours", "bits")
    return Job(
        rows=_count(values["rows"]),
        dense_bytes=_count(values["dense_bytes"]),
        growth=None if values["growth"] == "random" else _exponent(values["growth"]),
        interval_minutes=values["interval"],
        copy_bandwidth=None if copied is None else _GB * copied,
        read_bandwidth=None if read is None else _GB * read,
        **{name: values[name] for name in same},
    )


def _document(job: Job, found: Sequence[Forecast]) -> dict[str, Any]:
    return {
        "job": asdict(job),
        "full_fp32_bytes": job.full_fp32_bytes,
        "expected_restores": job.restores,
        "width": job.width,
        "reference_bytes": job.reference_bytes,
        "policies": [asdict(one) for one in found],
    }


def _print(job: Job, found: Sequence[Forecast]) -> None:
    width = "exact" if job.width == 32 else f"{job.width} bit"
    say(
        f"full in fp32: {size(job.full_fp32_bytes)}; expected restores: {job.restores:.3g}; "
        f"rows stored in {width}"
    )
    if found[0].checkpoints == MOST_CHECKPOINTS:
        say(f"(the first {MOST_CHECKPOINTS} checkpoints)")
    written = (">baseline every", ">mean", ">MB/s", ">x less")
    kept = (">kept", ">peak", ">x less", ">chain")
    times = (">stall", ">stalled", ">read", ">lost", ">best interval")
    print_table(("policy", *written, *kept, *times), map(_row, found))
    memory = (
        f"{size(total)} with method={method} ({size(total / job.nodes)} a node)"
        for method, total in job.reference_bytes.items()
    )
    say(f"memory for what the last checkpoint restores: {', '.join(memory)}; without links none")
    if job.copy_bandwidth is None:
        say(
            f"stalls: at {job.stalling_bandwidth / _GB:g} GB/s, {NODE_COPY_BANDWIDTH / _GB:g} a "
            "node; give --copy-bandwidth if yours is known"
        )


def _row(one: Forecast) -> list[str]:
    every = one.baseline_every
    return [
        one.policy,
        "never" if every is None else f"{every:.1f}",
        size(one.mean_bytes),
        f"{one.mean_bandwidth / 1e6:,.0f}",
        f"{one.reduction:.1f}",
        size(one.kept_bytes),
        size(one.peak_bytes),
        f"{one.capacity_reduction:.1f}",
        str(one.longest_chain),
        _seconds(one.mean_stall),
        f"{one.stalled:.3%}",
        _seconds(one.longest_read),
        f"{one.lost:.2%}",
        f"{one.best_interval_minutes:.0f} min",
    ]


def _seconds(value: float | None) -> str:
    return number(value) + ("" if value is None else " s")
