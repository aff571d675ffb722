"""Define ``plan``, which forecasts the cost of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

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


_Growth = Annotated[
    str,
    typer.Option(
        help="Exponent of the fraction's growth over intervals; 'random': each interval modifies "
        "other rows."
    ),
]
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


def plan(
    *,
    rows: Annotated[str, typer.Option(help="Rows of all tables, like 2e9.", show_default=False)],
    dim: Annotated[int, typer.Option(help="Columns of the tables.", show_default=False)],
    optimizer_bytes: Annotated[
        int, typer.Option(help="Bytes of a row's optimizer state; 4 is row-wise Adagrad's.")
    ] = 4,
    dense_bytes: Annotated[
        str, typer.Option(help="Bytes outside the tables, in every checkpoint.")
    ] = "0",
    fraction: Annotated[
        float, typer.Option(help="Fraction of the rows modified in one interval.")
    ] = Job.fraction,
    growth: _Growth = str(Job.growth),
    interval: Annotated[
        float, typer.Option(help="Minutes between checkpoints.")
    ] = Job.interval_minutes,
    job_hours: Annotated[float, typer.Option(help="Hours of training.")] = Job.job_hours,
    nodes: Annotated[int, typer.Option(help="Nodes; the job fails when one does.")] = Job.nodes,
    mtbf_hours: Annotated[
        float, typer.Option(help="Mean time between failures of one node.")
    ] = Job.mtbf_hours,
    bits: _Bits = None,
    copy_bandwidth: _CopyBandwidth = None,
    read_bandwidth: _ReadBandwidth = None,
    as_json: AsJson = False,
) -> None:
    """Forecast bytes, bandwidth, capacity, stall and width of each policy for a job."""
    try:
        job = Job(
            rows=_count(rows),
            dim=dim,
            optimizer_bytes=optimizer_bytes,
            dense_bytes=_count(dense_bytes),
            fraction=fraction,
            growth=None if growth == "random" else float(growth),
            interval_minutes=interval,
            job_hours=job_hours,
            nodes=nodes,
            mtbf_hours=mtbf_hours,
            bits=bits,
            copy_bandwidth=None if copy_bandwidth is None else _GB * copy_bandwidth,
            read_bandwidth=None if read_bandwidth is None else _GB * read_bandwidth,
        )
        found = [forecast(job, policy) for policy in POLICIES]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    (_print_json if as_json else _print)(job, found)


def _print_json(job: Job, found: Sequence[Forecast]) -> None:
    print_json(
        {
            "job": asdict(job),
            "full_fp32_bytes": job.full_fp32_bytes,
            "expected_restores": job.restores,
            "width": job.width,
            "policies": [asdict(one) for one in found],
        }
    )


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
