"""Put what the load benchmark of the server has found into tables, and these into a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- recipes.benchmarks.serving: begin -->\n", "<!-- end -->\n"
"""Lines of a page between which the tables stand."""


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    quantiles = ("p50_ms", "p99_ms", "slowest_ms")
    lines = ["| share | | requests | median | p99 | slowest |", "|---:|---|---:|---:|---:|---:|"]
    for of_share in found["shares"]:
        share = f"{of_share['share']:g}"
        for name in ("resting", "applying", "counting"):
            case = of_share[name]
            cells = (f"{case[key]:.1f} ms" for key in quantiles)
            lines.append(f"| {share} | {name} | {case['requests']} | {' | '.join(cells)} |")
        for name in ("applying", "counting"):
            ratios = (of_share[name][key] / of_share["resting"][key] for key in quantiles)
            cells = (f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {share} | {name} / resting | | {' | '.join(cells)} |")
    shares = [f"{of_share['share']:g}" for of_share in found["shares"]]
    served = "".join(f" revealed to served, {share} |" for share in shares)
    lines += [
        "",
        f"| publications | | rows | MB | stall of training | until durable |{served}",
        "|---|" + "---:|" * (5 + len(shares)),
    ]
    for kind, cost in found["shares"][0]["publication"].items():
        seconds = (each["publication"][kind]["visible_seconds"] for each in found["shares"])
        lines.append(
            f"| {kind} | {cost['count']} | {cost['rows']:.0f} | {cost['bytes'] / 1e6:.1f} | "
            f"{1e3 * cost['stall_seconds']:.0f} ms | {cost['seconds']:.2f} s | "
            + " | ".join(f"{visible:.2f} s" for visible in seconds)
            + " |"
        )
    each = found["shares"][-1]
    lines += [
        "",
        f"The server can answer {each['capacity']:.0f} requests of {found['samples']} samples a "
        f"second to 4 clients, and got {each['per_second']:.0f}; its tables have "
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
