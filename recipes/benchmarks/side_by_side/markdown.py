"""Print a run's figures as the tables of docs/explanation/benchmarks.md and of the README.

    python -m recipes.benchmarks.side_by_side_markdown [recipes/results/side_by_side.json]

A test compares them with the pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.benchmarks.side_by_side.systems import ASYNC, DCP, NONE, ON_WRITE
from recipes.benchmarks.side_by_side.tables import more_memory
from recipes.benchmarks.side_by_side.targets import Rows
from recipes.benchmarks.stall.tables import markdown as stalls

RESULTS = Path(__file__).parents[2] / "results"

README_SYSTEMS = (
    ON_WRITE,
    "ours fp32 consecutive, thread, copy on write",
    DCP,
    f"{ASYNC}, plain",
    f"{ASYNC}, DTensor, shared stager",
)
README_RESTORES = (
    DCP,
    "ours fp32, chain of 1 + 10",
    "ours 4 bit, chain of 1 + 10",
)

Columns = dict[str, Callable[[dict[str, Any]], str]]
"""Columns' headings, each with a function that makes the cell of a row."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _stall(label: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        return f"{_ms(row[label]['call'])} ({_ms(row[label]['extra'])})"

    return cell


_STALL: Columns = {"stall, ms": lambda row: _ms(row["warm"]["call"])}
_STALLS: Columns = {
    "set-up, s": lambda row: f"{row['setup']:.2f}",
    "stall, ms": _stall("warm"),
    "first save, ms": _stall("first"),
    "after an idle, ms": _stall("idle"),
    "longest step, ms": lambda row: _ms(row["warm"]["longest"]),
}
_PACE: Columns = {
    "throughput": lambda row: f"{row['of_without']:.1%}",
    "durable after, s": lambda row: f"{row['warm']['listed']:.2f}",
}
_MEMORY: Columns = {"more memory, MB": lambda row: more_memory(row["memory_beyond"])}
_SIZE: Columns = {"MB": lambda row: f"{row['bytes']['total'] / 1e6:,.1f}"}


def training(rows: Rows, columns: Columns) -> str:
    """Make the table of the cost of saves for training; without figures a cell is empty."""
    return _table("system", _named(rows), columns)


def apart(rows: Rows) -> str:
    """Make the table of systems measured in a run of their own, on 1 and 2 ranks."""
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "stall, ms": _stall("warm"),
        **_PACE,
        **_MEMORY,
        **_SIZE,
    }
    return _table("system", _named(rows), columns)


def limits(rows: Rows) -> str:
    """Make the table of the machine's own limits for an interval's rows, on all ranks at once."""
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "ms": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "MB": lambda row: f"{row['bytes'] / 1e6:,.0f}",
        "GB/s": lambda row: f"{row['gbps']:.2f}",
    }
    return _table("what the machine itself needs", _named(rows), columns)


def sizes(rows: Rows) -> str:
    """Make the table of the bytes of checkpoints."""

    def part(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[name] / 1e6:,.2f}"

    columns: Columns = {
        "mean over": lambda row: str(row["over"]),
        "MB": lambda row: f"{row['total'] / 1e6:,.1f}",
        "tables+ids, MB": part("tables"),
        "optimizer, MB": part("optimizer"),
        "dense, MB": part("dense"),
        "manifest, MB": part("manifest"),
        "of dcp.save's rows (tables, ids and optimizer)": partial(_share, rows),
        "kept, MB": lambda row: f"{row['kept'] / 1e6:,.0f}",
        "peak, MB": lambda row: f"{row['peak'] / 1e6:,.0f}",
    }
    return _table("a checkpoint", _named(rows), columns)


def _share(rows: Rows, row: dict[str, Any]) -> str:
    """Return a system's share of the rows that ``dcp.save`` writes."""
    load = next(row["rows"] for row in rows if row["name"] == DCP)
    return f"1/{load / row['rows']:.2f}"


def instants(rows: Rows) -> str:
    """Make the table of whether a background save is one instant."""

    def cell(row: dict[str, Any]) -> str:
        if "error" in row:
            return "failed"
        return "yes" if row["one_instant"] else "no"

    return _table("what is written behind training", _named(rows), {"one instant": cell})


def restores(rows: Rows, head: str) -> str:
    """Make the table of the times of restores."""
    load = next(row["median"] for row in rows if row["name"] == DCP)
    columns: Columns = {
        "s": lambda row: f"{row['median']:.2f}",
        "times dcp.load": lambda row: f"{row['median'] / load:.2f}",
    }
    return _table(head, _named(rows), columns)


def targets(aims: Rows) -> str:
    """Make the table of the targets."""
    columns: Columns = {
        "measured": lambda aim: f"{aim['value']:.3g}",
        "wanted": lambda aim: f"{'≤' if aim['at_most'] else '≥'} {aim['limit']:g}",
        "": lambda aim: "met" if aim["met"] else "missed",
    }
    names = (aim["claim"] + (f" ({aim['note']})" if aim["note"] else "") for aim in aims)
    return _table("target", zip(names, aims, strict=True), columns)


def page(
    found: dict[str, Any], torchsnapshot: dict[str, Any], stall: dict[str, Any]
) -> Iterator[str]:
    """Yield the tables of docs/explanation/benchmarks.md, for the targets' trace.

    Args:
        torchsnapshot: the document of a run with torchsnapshot.
        stall: the document of `recipes.benchmarks.stall`.
    """
    alone, both = (_trained(found, ranks) for ranks in (1, 2))
    yield training(alone, {**_STALLS, **_PACE, **_MEMORY, **_SIZE})
    yield training(both, {**_STALLS, **_PACE, **_MEMORY})
    yield apart([row for ranks in (1, 2) for row in _trained(torchsnapshot, ranks)])
    yield limits(found["limits"])
    yield instants(found["instants"])
    yield sizes(_weighed(found))
    yield restores(_restored(found, 1), "restore, files in the system's cache")
    yield restores(_restored(found, 2), "restore on two ranks")
    yield targets(found["targets"])
    yield from stalls(stall)


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of the README, and a sentence."""
    trained = {row["name"]: row for row in _trained(found, 1)}
    shown = [trained[name] for name in README_SYSTEMS]
    yield training(shown, {**_STALL, **_PACE, **_SIZE})
    restored = {row["name"]: row for row in _restored(found, 1)}
    yield restores([restored[name] for name in README_RESTORES], "restore")
    yield _shares(_weighed(found))


def _shares(rows: Rows) -> str:
    shares = {row["name"]: _share(rows, row) for row in rows}
    return (
        f"Of the tables, ids and optimizer rows that `{DCP}` writes, a 4-bit differential of the "
        f"consecutive policy takes {shares['ours 4 bit consecutive']} "
        f"({shares['ours 4 bit consecutive, bf16 optimizer']} with its optimizer rows in bf16); "
        "averaged from baseline to baseline, the intermittent policy takes "
        f"{shares['ours 2 bit intermittent']} in 2 bits and {shares['ours 8 bit intermittent']} in "
        "8 bits."
    )


def _weighed(found: dict[str, Any]) -> Rows:
    return [row for row in found["bytes"] if row["trace"] == "skewed" and "error" not in row]


def _restored(found: dict[str, Any], ranks: int) -> Rows:
    return [row for row in found["restore"] if row["ranks"] == ranks and "error" not in row]


def _trained(found: dict[str, Any], ranks: int) -> Rows:
    return [
        row
        for row in found["training"]
        if (row["ranks"], row["trace"]) == (ranks, "skewed")
        and row["name"] != NONE
        and "error" not in row
    ]


def _named(rows: Rows) -> list[tuple[str, dict[str, Any]]]:
    return [(row["name"], row) for row in rows]


def _table(head: str, rows: Iterable[tuple[str, dict[str, Any]]], columns: Columns) -> str:
    lines = [_line([head, *columns]), "|---|" + "---:|" * len(columns)]
    for name, row in rows:
        lines.append(_line([name, *(cell(row) for cell in columns.values())]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the command."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "side_by_side.json"
    found = json.loads(path.read_text())
    beside = json.loads((RESULTS / "side_by_side_torchsnapshot.json").read_text())
    stall = json.loads((RESULTS / "stall.json").read_text())
    for table in [*page(found, beside, stall), "README:", *summary(found)]:
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
