"""Tables of what papers claim, and of what restores cost, are those of the committed results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipes.figures.accuracy.markdown import tables
from tests.docs.blocks import REPOSITORY

RESULTS = REPOSITORY / "recipes" / "results"
EXPLANATION = REPOSITORY / "docs" / "explanation"
CASES = {"L <= 1": "≤ 1", "L <= 3": "≤ 3", "L <= 20": "≤ 20", "L > 20": "> 20"}


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def page(name: str) -> list[str]:
    return (EXPLANATION / name).read_text().splitlines()


def overall() -> list[str]:
    """Make the rows of Figure 17's table: log8's, and those of differences."""
    found: dict[str, list[str]] = {}
    bits: dict[str, str] = {}
    for row in result("overall.json")["rows"]:
        if row["way"] == "widths, log8":
            name = f"L {CASES[row['restores']]}"
        elif row["way"].startswith("delta"):
            name = "any, by differences"
        else:
            continue
        bits[name] = str(row["bits"] or "")
        f = row["factors"]
        found.setdefault(name, []).extend(
            f"{f[kind]:.1f} ({f[f'tables_{kind}']:.1f})" for kind in ("written", "kept")
        )
    return [f"| {name} | {bits[name]} | {' | '.join(cells)} |" for name, cells in found.items()]


def lc() -> list[str]:
    """Make the rows of LC-Checkpoint's table."""
    rows = result("lc_checkpoint.json")["rows"]
    others = {(r["job"], r["matched"], r["scheme"]): r for r in rows if r["matched"] is not None}
    found = []
    for row in rows:
        if row["scheme"] == "LC" and (row["job"], row["bits"], "SCAR") in others:
            cells = [f"{row['ratio']:.1f}", f"{row['rework']:.1f}"]
            cells += [
                f"{others[row['job'], row['bits'], scheme]['rework']:.1f}"
                for scheme in ("SCAR", "TOPN", "uniform step")
            ]
            found.append(f"| {row['job']} | {row['bits']} | {' | '.join(cells)} |")
    return found


def accuracy() -> list[str]:
    return [line for _, lines in tables(result("accuracy.json")) for line in lines]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("quantization_and_accuracy.md", accuracy()),
        ("papers.md", overall()),
        ("papers.md", lc()),
    ],
    ids=["accuracy", "overall", "lc"],
)
def test_the_table_is_the_results(name: str, lines: list[str]) -> None:
    assert len(lines) >= 4
    shown = page(name)
    missing = [
        line for line in lines if not any(own == line or own.startswith(line) for own in shown)
    ]
    assert not missing, "\n".join(["not in the page:", *missing])
