"""Arrange the figures of `recipes.benchmarks.stall` in tables, for terminal and docs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipes.benchmarks.stall.modes import ON_WRITE

Cells = list[str]


def tables(document: dict[str, Any]) -> Iterator[list[Cells]]:
    """Yield tables, each a list of rows of cells; the first row is the head."""
    yield _modes(document["modes"])
    yield _parts(document["modes"][ON_WRITE])
    yield _growth(document["growth"])
    yield _targets(document["targets"])


def markdown(document: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of docs/explanation/benchmarks.md."""
    for head, *rows in tables(document):
        lines = [_line(head), "|---|" + "---:|" * (len(head) - 1), *map(_line, rows)]
        yield "\n".join(lines)


def _modes(modes: dict[str, Any]) -> list[Cells]:
    head = ["mode", "stall, ms", "cut, ms", "protection, ms", "longest wait, ms"]
    found = [[*head, "times the gather", "times copy on write's"]]
    for name, mode in modes.items():
        waits = [_ms(mode[part]) for part in ("whole", "cut", "protection", "longest")]
        ratio = "–" if mode["ratio"] is None else f"{mode['ratio']:.2f}"
        found.append([name, *waits, ratio, f"{mode['of_on_write']:.3g}"])
    return found


def _parts(mode: dict[str, Any]) -> list[Cells]:
    found = [[f"part of a stall with {ON_WRITE}", "ms"]]
    found += [[f"the cut: {name}", _ms(seconds)] for name, seconds in mode["parts"].items()]
    rows, steps = mode["protected_rows"], mode["steps"]
    found.append([f"protection of {rows:,.0f} rows, in {steps:.0f} steps", _ms(mode["protection"])])
    found.append([f"bare gather of the {mode['rows']:,.0f} rows", _ms(mode["gather"])])
    return found


def _growth(growth: list[dict[str, float]]) -> list[Cells]:
    found = [["rows of a narrow table", "modified", "cut, ms", "protection, ms"]]
    for one in growth:
        waits = [_ms(one["cut"]), _ms(one["protection"])]
        found.append([f"{one['rows']:,.0f}", f"{one['modified']:,.0f}", *waits])
    return found


def _targets(targets: list[dict[str, Any]]) -> list[Cells]:
    found = [["goal", "measured", "wanted", ""]]
    for one in targets:
        verdict = "met" if one["met"] else "missed"
        found.append([one["claim"], f"{one['value']:.3g}", f"≤ {one['limit']:g}", verdict])
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _line(cells: Cells) -> str:
    return "| " + " | ".join(cells) + " |"
