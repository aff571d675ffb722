"""Read the JSON lines of a run: what its loop wrote of checkpoints and restores, and more.

Lines that are not JSON are skipped with a warning: a killed process may have written half a line,
and the next process has continued that line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from torchrec_checknrun.cli.output import complain
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.checks import Measure, Text, typed


@dataclass
class Measured:
    """The seconds that a run's saves and restores took.

    Attributes:
        save: training waited for each checkpoint.
        durable: each checkpoint took to count.
        load: each restore took.
    """

    save: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


class _Save(msgspec.Struct):
    """The fields read of a checkpoint's line."""

    id: Text
    stall_seconds: Measure
    committed_seconds: Measure
    unchanged: bool = False


class _Restore(msgspec.Struct):
    """The field read of a restore's report."""

    seconds: Measure


def read_events(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return all events with the numbers of their lines.

    Raises:
        CheckNRunError: no line is JSON.
        OSError: there is no such file.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    torn: list[int] = []
    lines = {n: line for n, line in enumerate(path.read_bytes().splitlines(), 1) if line.strip()}
    for number, line in lines.items():
        try:
            event = json.loads(line.decode())
        except (ValueError, RecursionError):
            torn.append(number)
            continue
        if isinstance(event, dict):
            found.append((number, event))
    if torn and len(torn) == len(lines):
        raise no_report(path, torn[0], "no line of the file is JSON")
    for number in torn:
        complain(f"{path}, line {number}, is incomplete and was skipped")
    return found


def is_checkpoint(event: dict[str, Any]) -> bool:
    """Tell whether a line is of a checkpoint: an event of that name, or a bare report."""
    return event.get("event", "checkpoint") == "checkpoint"


def no_report(path: Path, number: int, why: str) -> CheckNRunError:
    """Return the error of a line that should be a report."""
    return CheckNRunError(
        f"{path}, line {number}, is no report of a checkpoint ({why}): write one "
        "CheckpointReport.to_json() a line"
    )


def measured(path: Path) -> Measured:
    """Read how long a run's saves and restores took.

    Restores are events named ``restore``, or the report that any other event has as ``restored``.

    Raises:
        CheckNRunError: a line of a checkpoint or a restore is malformed.
        OSError: there is no such file.
    """
    saves: dict[str, _Save] = {}
    found = Measured()
    for number, event in read_events(path):
        restored = event if event.get("event") == "restore" else event.get("restored")
        try:
            if restored is not None:
                found.load.append(float(typed(restored, _Restore).seconds))
            elif is_checkpoint(event):
                saved = typed(event, _Save)
                if not saved.unchanged:  # its times are of the save that wrote it
                    saves[saved.id] = saved
        except ValueError as error:
            raise no_report(path, number, repr(error)) from error
    found.save = [float(saved.stall_seconds) for saved in saves.values()]
    found.durable = [float(saved.committed_seconds) for saved in saves.values()]
    return found
