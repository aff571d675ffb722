"""Tables of what papers claim, and of what restores cost, are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks.serving_table import markdown, put_into, shown
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


def accuracy(name: str) -> list[str]:
    return [line for _, lines in tables(result(name)) for line in lines]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("quantization_and_accuracy.md", accuracy("accuracy.json")),
        ("quantization_and_accuracy.md", accuracy("accuracy_loss.json")),
        ("quantization_and_accuracy.md", accuracy("accuracy_state.json")),
        ("quantization_and_accuracy.md", accuracy("accuracy_finely.json")),
        ("quantization_and_accuracy.md", accuracy("accuracy_logdelta.json")),
        ("papers.md", overall()),
        ("papers.md", lc()),
    ],
    ids=["accuracy", "by the loss", "state", "finely", "logdelta", "overall", "lc"],
)
def test_the_table_is_the_results(name: str, lines: list[str]) -> None:
    assert len(lines) >= 4
    shown = page(name)
    missing = [
        line for line in lines if not any(own == line or own.startswith(line) for own in shown)
    ]
    assert not missing, "\n".join(["not in the page:", *missing])


SERVING = {
    "samples": 16,
    "rows": 3_376_266,
    "shares": [
        {
            "share": share,
            "capacity": 400.4,
            "per_second": 100.1,
            "applying": {"requests": 900, "p50_ms": 2.2, "p99_ms": p99, "slowest_ms": 9.0},
            "resting": {"requests": 1000, "p50_ms": 2.0, "p99_ms": 5.0, "slowest_ms": 6.0},
            "counting": {"requests": 1000, "p50_ms": 2.1, "p99_ms": 6.5, "slowest_ms": 12.0},
            "publication": {
                "differential": {
                    "count": 3,
                    "rows": 877819,
                    "bytes": 21_500_000,
                    "stall_seconds": 0.002,
                    "seconds": 0.14,
                    "visible_seconds": seconds,
                }
            },
        }
        for share, p99, seconds in ((1.0, 6.0, 0.36), (0.25, 5.5, 0.72))
    ],
}


def test_the_servers_tables_are_put_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (REPOSITORY / "docs" / "how-to" / "serve.md").read_text()
    page.write_text(text)
    for _ in range(2):
        put_into(page, SERVING)
        assert shown(page) == markdown(SERVING)
    lines = shown(page).splitlines()
    assert "| 1 | applying / resting | | 1.10 | 1.20 | 1.50 |" in lines
    assert "| 0.25 | applying / resting | | 1.10 | 1.10 | 1.50 |" in lines
    assert "| 0.25 | counting / resting | | 1.05 | 1.30 | 2.00 |" in lines
    assert "| differential | 3 | 877819 | 21.5 | 2 ms | 0.14 s | 0.36 s | 0.72 s |" in lines
    assert page.read_text().partition("<!-- rec")[0] == text.partition("<!-- rec")[0]
    page.write_text("no place")
    with pytest.raises(ValueError, match="lacks a line"):
        put_into(page, SERVING)


def test_the_servers_tables_are_the_result() -> None:
    """Show nothing on the page where nothing was measured yet."""
    result_file = RESULTS / "serving.json"
    wanted = markdown(result("serving.json")) if result_file.exists() else ""
    assert shown(REPOSITORY / "docs" / "how-to" / "serve.md") == wanted
