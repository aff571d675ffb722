"""``plan``: what checkpoints of a job will cost."""

from __future__ import annotations

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
    """A number as people write large ones: 2000000000 or 2e9."""
    try:
        return int(text) if text.isdigit() else int(float(text))
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no number: write 2000000000 or 2e9") from None


def plan(
    *,
    rows: Annotated[str, typer.Option(help="Rows of all tables, like 2e9.", show_default=False)],
    dim: Annotated[int, typer.Option(help="Columns of the tables.", show_default=False)],
    optimizer_bytes: Annotated[
        int, typer.Option(help="Optimizer state of a row; 4 is row-wise Adagrad's.")
    ] = 4,
    dense_bytes: Annotated[
        str, typer.Option(help="Of what isn't a table, in every checkpoint.")
    ] = "0",
    fraction: Annotated[
        float, typer.Option(help="Of the rows, modified in one interval.")
    ] = Job.fraction,
    growth: Annotated[
        str,
        typer.Option(
            help="Exponent of its growth over intervals; 'random': each modifies other rows."
        ),
    ] = str(Job.growth),
    interval: Annotated[float, typer.Option(help="Minutes.")] = Job.interval_minutes,
    job_hours: Annotated[float, typer.Option(help="How long it trains.")] = Job.job_hours,
    nodes: Annotated[int, typer.Option(help="The job fails when one does.")] = Job.nodes,
    mtbf_hours: Annotated[
        float, typer.Option(help="Mean time between failures of one node.")
    ] = Job.mtbf_hours,
    bits: Annotated[
        int | None,
        typer.Option(help="2, 3, 4, 8, or 32 for exact; without, as expected restores allow."),
    ] = None,
    copy_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s at which all ranks together copy rows, for the stall; "
            f"without: {NODE_COPY_BANDWIDTH / _GB:g} a node."
        ),
    ] = None,
    read_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s at which all ranks together read, for restores.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plans checkpoints: bytes, bandwidth, capacity, stall and width to expect of each policy."""
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
    if as_json:
        print_json(
            {
                "job": asdict(job),
                "full_fp32_bytes": job.full_fp32_bytes,
                "expected_restores": job.restores,
                "width": job.width,
                "policies": [asdict(one) for one in found],
            }
        )
        return
    width = "exact" if job.width == 32 else f"{job.width} bit"
    say(
        f"full in fp32: {size(job.full_fp32_bytes)}; expected restores: {job.restores:.3g}; "
        f"rows stored in {width}"
    )
    if found[0].checkpoints == MOST_CHECKPOINTS:
        say(f"(the first {MOST_CHECKPOINTS} checkpoints)")
    headings = ("baseline every", "mean", "MB/s", "x less", "kept", "peak", "x less ", "chain")
    columns = {"policy": "left", **dict.fromkeys(headings, "right")}
    columns |= dict.fromkeys(("stall", "stalled", "read", "lost", "best interval"), "right")
    print_table(None, columns, [_row(one) for one in found])
    if copy_bandwidth is None:
        say(
            f"stalls: at {job.stalling_bandwidth / _GB:g} GB/s, {NODE_COPY_BANDWIDTH / _GB:g} a "
            "node; --copy-bandwidth if yours is known"
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
