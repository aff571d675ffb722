"""Run a program as a whole, and again killed and resumed, and compare the final objects."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.distributed.worker_pool import WorkerPool
from tests.programs.live import differences
from tests.programs.session import INTERVAL, KILLED_AT, run_here

Ranks = list[dict[str, Any]]
"""The objects of each rank at the end; see ``session.Ended``."""
SHOWN = 60
SAME_BYTES = ("weights", "ids", "optimizer", "dense")


def killed_and_resumed(
    ranks: WorkerPool, folder: Path, program: str, **options: Any
) -> tuple[Ranks, Ranks]:
    """Return the ends of a run that was killed and resumed, and of an uninterrupted one."""
    wanted = _ended(ranks, folder / "whole", program, **options)
    assert {rank["resumed_from"] for rank in wanted} == {0}
    answers = ranks.run(
        run_here, root=str(folder / "killed"), program=program, kill_at=KILLED_AT, **options
    )
    assert answers[1] == {"signal": signal.SIGKILL}, answers
    resumed = _ended(ranks, folder / "killed", program, **options)
    last = KILLED_AT // INTERVAL * INTERVAL
    assert {rank["resumed_from"] for rank in resumed} <= {last, last - INTERVAL}
    return resumed, wanted


def compare(resumed: Ranks, wanted: Ranks) -> None:
    """Check that every live object of every rank is equal."""
    lost = [
        f"rank {rank}: {line}"
        for rank, (found, whole) in enumerate(zip(resumed, wanted, strict=True))
        for line in differences(found["live"], whole["live"])
    ]
    shown = "\n".join(lost[:SHOWN])
    assert not lost, f"{len(lost)} of {len(wanted) * len(wanted[0]['live'])} differ:\n{shown}"


def compare_bytes(resumed: Ranks, wanted: Ranks) -> None:
    """Check that the checkpoints after the restore are as large as without a restore.

    Only the first one's dense part may be larger, and is as large as a whole one: the process that
    held the parent's, to store the difference to it, is dead.
    """
    whole = {report["step"]: _size(report) for report in wanted[0]["reports"]}
    found = {report["step"]: _size(report) for report in resumed[0]["reports"]}
    assert found, "nothing was saved after the restore"
    first = found[min(found)]
    assert first["dense"] <= max(size["dense"] for size in whole.values())
    first["dense"] = whole[min(found)]["dense"]
    assert found == {step: whole[step] for step in found}


def _size(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": report["kind"],
        "rows": report["modified_rows"],
        **{name: report["bytes"][name] for name in SAME_BYTES},
    }


def _ended(ranks: WorkerPool, root: Path, program: str, **options: Any) -> Ranks:
    answers = ranks.run(run_here, root=str(root), program=program, **options)
    errors = [answer for answer in answers if "value" not in answer]
    assert not errors, "\n".join(str(a.get("error", a)) for a in errors)
    return [answer["value"] for answer in answers]
