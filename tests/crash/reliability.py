"""Inject every fault there is; print the table of docs/explanation/consistency_and_crashes.md.

``python -m tests.crash.reliability --json recipes/results/reliability.json``; with ``--only`` some
of its rows (or none), beside those that the file holds already.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.crash import failure_matrix, kills
from tests.crash.chain_sweep import ChainSweep
from tests.crash.corruption import CorruptionSweep
from tests.crash.faulty_store import Mode
from tests.crash.save_sweep import Phase, Sweep, Tally, alone, faulty_roots
from tests.distributed.worker_pool import WorkerPool

Row = dict[str, Any]
"""``tried``, ``unit``, ``lost`` (what was not as it should be) and whatever else is counted."""


def _of(tally: Tally, unit: str) -> Row:
    counts = {"surfaced": tally.surfaced, "healed": tally.healed, "new": tally.new}
    return {"tried": tally.injected, "unit": unit, "lost": tally.lost, **counts}


def _disks(folder: Path) -> Iterator[Path | None]:
    yield None
    yield folder / "disk"


def saves(folder: Path) -> Row:
    """Fail one operation of a save, each in turn."""
    total = Tally()
    with alone():
        for disk in _disks(folder):
            with faulty_roots(disk) as where:
                for phase in Phase:
                    sweep = Sweep(*where, phase)
                    total = sum((sweep.run(mode) for mode in Mode), total)
    return _of(total, "faults")


def chains(folder: Path) -> Row:
    """Fail one operation of a compaction or a pruning, each in turn."""
    total = Tally()
    with alone():
        for disk in _disks(folder):
            with faulty_roots(disk) as where:
                sweep = ChainSweep(*where)
                for work in ("compact", "prune"):
                    total = sum((sweep.run(work, mode) for mode in Mode), total)
    return _of(total, "faults")


def phases(folder: Path) -> Row:
    """Fail a save in each phase on each of two ranks."""
    chosen, pool = failure_matrix.cases(), WorkerPool(2)
    try:
        answers = pool.run(
            failure_matrix.fail_everywhere,
            timeout=500.0,
            root=str(folder),
            chosen=[list(case) for case in chosen],
        )
    finally:
        pool.stop()
    return _of(failure_matrix.judge(answers, chosen), "faults")


def corruptions(folder: Path) -> Row:
    """Damage every file of a chain in every way."""
    with alone():
        sweep = CorruptionSweep(folder)
        found = sweep.run(sweep.damages())
    return {
        "tried": found.tried,
        "unit": "corruptions",
        "lost": found.lost,
        "named": found.named,
        "kinds": found.kinds,
    }


def killed(folder: Path) -> Row:
    """Send SIGKILL in every phase, to each of two ranks and to both."""
    from tests.crash.test_kills import sweep_kills, train_uninterrupted

    uninterrupted = train_uninterrupted(folder / "uninterrupted")
    lost = sweep_kills(uninterrupted, folder / "killed")
    planned = kills.sweep()
    return {
        "tried": sum(len(kill.victims) for kill in planned),
        "unit": "kills",
        "lost": lost,
        "restarts": len(planned),
    }


def killed_links(folder: Path, method: str = "delta") -> Row:
    """The same where rows are stored as differences to the last checkpoint"""
    from tests.crash.test_kills_of_links import sweep_kills

    planned = kills.sweep()
    return {
        "tried": sum(len(kill.victims) for kill in planned),
        "unit": "kills",
        "lost": sweep_kills(folder, method),
        "restarts": len(planned),
    }


def killed_logdelta(folder: Path) -> Row:
    """The same with differences of optimizer state, too"""
    return killed_links(folder, "logdelta")


def killed_lc(folder: Path) -> Row:
    """The same with the links of LC-Checkpoint"""
    return killed_links(folder, "lc")


def soak(results: Path) -> Row:
    """Save a thousand checkpoints with retention and random faults (`make soak`)."""
    result = json.loads((results / "soak.json").read_text())
    return {
        "tried": result["faults"],
        "unit": "faults",
        "lost": result["lost"],
        "seconds": result["seconds"],
    }


def hostile(results: Path) -> Row:
    """Read forged and damaged chains (`tests.unit.fuzz`)."""
    result = json.loads((results / "fuzz.json").read_text())
    # The fuzzer ends with an error at the first input that does harm, and writes no file.
    return {
        "tried": result["inputs"],
        "unit": "hostile inputs",
        "lost": [],
        "seconds": result["seconds"],
    }


ROWS: dict[str, Callable[[Path], Row]] = {
    "saves": saves,
    "chains": chains,
    "phases": phases,
    "corruptions": corruptions,
    "kills": killed,
    "kills-links": killed_links,
    "kills-links-logdelta": killed_logdelta,
    "kills-links-lc": killed_lc,
}
OTHERS: dict[str, tuple[str, Callable[[Path], Row]]] = {
    "soak": ("soak.json", soak),
    "hostile": ("fuzz.json", hostile),
}
"""The results that other commands have written beside this one's, where they were run."""


def table(rows: dict[str, Row]) -> str:
    """Format the table as it stands in the docs."""
    lines = ["| what | tried | lost | seconds |", "|---|---|---|---|"]
    for name, row in rows.items():
        act = ROWS[name] if name in ROWS else OTHERS[name][1]
        said = (act.__doc__ or name).strip().rstrip(".")
        lost = len(row["lost"]) or "nothing"
        lines.append(f"| {said} | {row['tried']} {row['unit']} | {lost} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # every fault is logged
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text())
    for name in given.only:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            row = ROWS[name](Path(folder))
        rows[name] = {**row, "seconds": round(time.monotonic() - started, 1)}
        print(f"{name}: {rows[name]}", file=sys.stderr)
        if given.json:
            ordered = {name: rows[name] for name in ROWS if name in rows}
            given.json.write_text(json.dumps(ordered, indent=1) + "\n")
    rows = {name: rows[name] for name in ROWS if name in rows}
    for name, (file, read) in OTHERS.items():
        if given.json and (given.json.parent / file).exists():
            rows[name] = read(given.json.parent)
    print(table(rows))
    return any(row["lost"] for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
