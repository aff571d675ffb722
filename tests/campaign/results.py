"""Keep the file of results: counts, seeds, machine and versions by part; make the table from it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.campaign.outcome import KINDS, Outcome
from tests.campaign.parts import PARTS

Row = dict[str, Any]
_BEGIN, _END = "<!-- campaign -->", "<!-- end of campaign -->"
_MOST_FAILURES = 50
"""Failures of a part to describe in words."""


def read(file: Path | None) -> dict[str, Row]:
    """Return the rows of a file of results, by part; none if there is no file."""
    rows: dict[str, Row] = json.loads(file.read_text()) if file and file.exists() else {}
    return rows


def write(file: Path, rows: dict[str, Row]) -> None:
    """Write a file of results, in the parts' order."""
    ordered = {part: rows[part] for part in PARTS if part in rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ordered, indent=1, sort_keys=False) + "\n")


def continued(before: Row | None, row: Row, first: int) -> Row:
    """Add a row to an earlier one that ends where the row begins, or replace the earlier one.

    Args:
        before: the part's row in the file of results.
        first: number of the row's first trial.
    """
    if before is None or (before["seed"], before["trials"]) != (row["seed"], first):
        return row
    sums = ("tried", *KINDS, "trials", "seconds", "cpu_seconds")
    counts: Counter[str] = Counter(before["counts"])
    counts.update(row["counts"])
    return {
        **row,
        **{name: round(before[name] + row[name], 1) for name in sums},
        "failures": [*before["failures"], *row["failures"]][:_MOST_FAILURES],
        "counts": dict(sorted(counts.items())),
        "commit": ", ".join(dict.fromkeys((*before["commit"].split(", "), row["commit"]))),
    }


def row_of(
    part: str,
    outcome: Outcome,
    *,
    seed: int,
    trials: int,
    seconds: float,
    cpu_seconds: float,
    processes: int,
) -> Row:
    """Return a part's row."""
    kinds = {kind: sum(f.kind == kind for f in outcome.failures) for kind in KINDS}
    return {
        "tried": outcome.counts[PARTS[part].unit[0]],
        "unit": PARTS[part].unit[1],
        **kinds,
        "failures": [
            {**vars(failure), "repeat": repeat(part, seed, failure.trial)}
            for failure in outcome.failures[:_MOST_FAILURES]
        ],
        "seed": seed,
        "trials": trials,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "processes": processes,
        "counts": dict(sorted(outcome.counts.items())),
        **about(),
    }


def repeat(part: str, seed: int, trial: int) -> str:
    """Return the command that repeats one trial."""
    return f"python -m tests.campaign --part {part} --seed {seed} --trial {trial}"


def about() -> dict[str, Any]:
    """Return the tested commit, the machine and the versions."""
    commit = _git("describe", "--always")
    # Exclude the results: earlier parts' results are written into the tested tree.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!recipes/results")
    packages = ("torchrec-checknrun", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy")
    return {
        "commit": (commit or "unknown") + "-dirty" * bool(changed),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name))},
    }


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def table(rows: dict[str, Row]) -> str:
    """Make the table of ``docs/explanation/consistency_and_crashes.md``."""
    lines = [
        "| what | tried | lost | silent | other failures | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for part, row in rows.items():
        other = sum(row[kind] for kind in KINDS if kind not in ("lost", "silent"))
        lines.append(
            f"| {PARTS[part].says} | {row['tried']:,} {row['unit']} | {row['lost']} | "
            f"{row['silent']} | {other} | {row['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def put_into(page: Path, rows: dict[str, Row]) -> None:
    """Replace the table of a page, between its two marks."""
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page} lacks {_BEGIN} or {_END}: put them where the table goes")
    page.write_text(f"{before}{begin}\n\n{table(rows)}\n\n{end}{after}")


def problems(rows: dict[str, Row]) -> list[str]:
    """List broken promises, and parts with too few trials."""
    found = []
    for part, row in rows.items():
        for failure in row["failures"]:
            found.append(f"{part}: {failure['kind']}: {failure['what']}\n  {failure['repeat']}")
    return found


def too_few(rows: dict[str, Row]) -> list[str]:
    """List the parts with fewer trials than the campaign promises."""
    return [
        f"{part}: {row['tried']} {row['unit']} of {PARTS[part].goal}"
        for part, row in rows.items()
        if row["tried"] < PARTS[part].goal
    ]
