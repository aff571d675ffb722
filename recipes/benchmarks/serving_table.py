"""Put what the load benchmark of the server has found into tables, and these into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- recipes.benchmarks.serving: begin -->\n", "<!-- end -->\n"
"""Lines of a page between which the tables stand."""


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    lines = ["| | requests | median | p99 | slowest |", "|---|---:|---:|---:|---:|"]
    for name in ("applying", "resting"):
        case = found[name]
        cells = (f"{case[key]:.1f} ms" for key in ("p50_ms", "p99_ms", "slowest_ms"))
        lines.append(f"| {name} | {case['requests']} | {' | '.join(cells)} |")
    ratios = (
        found["applying"][key] / found["resting"][key] for key in ("p50_ms", "p99_ms", "slowest_ms")
    )
    lines.append(f"| ratio | | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    lines += [
        "",
        "| publications | | rows | MB | stall of training | until durable | revealed to served |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, cost in found["publication"].items():
        lines.append(
            f"| {kind} | {cost['count']} | {cost['rows']:.0f} | {cost['bytes'] / 1e6:.1f} | "
            f"{1e3 * cost['stall_seconds']:.0f} ms | {cost['seconds']:.2f} s | "
            f"{cost['visible_seconds']:.2f} s |"
        )
    lines += [
        "",
        f"The server can answer {found['capacity']:.0f} requests of {found['samples']} samples a "
        f"second to 4 clients, and got {found['per_second']:.0f}; its tables have "
        f"{found['rows'] / 1e6:.1f} M rows.",
    ]
    return "\n".join(lines)


def put_into(page: Path, found: dict[str, Any]) -> None:
    """Put the tables into a page, in place of those that are there.

    Raises:
        ValueError: the page has no place for them.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks a line {BEGIN.strip()!r}, or {END.strip()!r} after it")
    page.write_text(f"{before}{BEGIN}\n{markdown(found)}\n\n{END}{after}")


def shown(page: Path) -> str:
    """Return the tables that stand in a page; empty if none do."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0].strip()
