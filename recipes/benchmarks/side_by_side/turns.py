"""Run the workers of several systems, a few alive at a time, each in its turn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.benchmarks.side_by_side.model import Setting
from recipes.benchmarks.side_by_side.systems import CASES

PAIRS = 2
"""Pairs of blocks in a turn, without and with a save: the first save of a turn is a run's first one
or comes after an idle, the others are warm.
"""
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 900.0


class WorkerFailed(Exception):
    """A system failed; the message is its own."""


class Live:
    """The processes of one system, and a watcher of its store."""

    def __init__(
        self, case: str, setting: Setting, ranks: int, turns: int, pairs: int, folder: Path
    ) -> None:
        folder.mkdir(parents=True)
        self.case, self._folder, self._turns = case, folder, turns
        self._last_turn = time.monotonic()
        plan = {"case": case, "setting": asdict(setting), "turns": turns, "pairs": pairs}
        plan["benchmark"] = os.getpid()
        (folder / "case.json").write_text(json.dumps(plan))
        worker = ["-m", "recipes.benchmarks.side_by_side.worker", str(folder)]
        if ranks > 1:
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            worker = ["-m", *launch, *worker]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *worker], stdout=log, stderr=subprocess.STDOUT
            )
        watch = ["-m", "recipes.benchmarks.side_by_side.store", str(folder / "store")]
        self._watcher = subprocess.Popen(
            [sys.executable, *watch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, number: int, idle_seconds: float) -> None:
        """Let the system have its turn, at least ``idle_seconds`` after its last one."""
        self._until(f"ready-{number}")
        if number:
            time.sleep(max(0.0, self._last_turn + idle_seconds - time.monotonic()))
        (self._folder / f"turn-{number}").touch()
        last = number + 1 == self._turns
        self._until("result.json" if last else f"ready-{number + 1}")
        self._last_turn = time.monotonic()

    def result(self) -> dict[str, Any]:
        """Return the worker's result with ``listed``: seconds from each begin until the watcher saw
        the checkpoint.
        """
        self._process.wait(_PATIENCE_SECONDS)
        found: dict[str, Any] = json.loads((self._folder / "result.json").read_text())
        out, _ = self._watcher.communicate("stop\n", timeout=60)
        seen = [when for _, when in sorted(json.loads(out).items())]
        for save, when in zip(found["saves"], seen, strict=False):
            save["listed"] = when - save["begun"]
        return {"name": self.case, **found}

    def close(self) -> None:
        """End the remaining processes, and delete the system's files."""
        for process in (self._process, self._watcher):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for pipe in (self._watcher.stdin, self._watcher.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _until(self, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (self._folder / name).exists():
            if self._process.poll() is not None and not (self._folder / name).exists():
                raise WorkerFailed(self._why())
            if time.monotonic() > deadline:
                raise WorkerFailed(f"took longer than {_PATIENCE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _why(self) -> str:
        for path in sorted(self._folder.glob("error-*")):
            return str(json.loads(path.read_text()))
        return (self._folder / "log").read_text()[-500:]


def run(
    cases: Sequence[str],
    setting: Setting,
    ranks: int,
    turns: int,
    folder: Path,
    *,
    together: int,
    pairs: Mapping[str, int],
    idle_seconds: float,
    progress: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Measure systems, ``together`` of them in the same rounds.

    Args:
        cases: names in ``CASES``.
        pairs: of blocks in a turn, by system; ``PAIRS`` for others.
        progress: called after every turn, with the number done.

    Returns:
        Each worker's result; ``error`` for a failed one; ``group``: equal for systems measured in
        the same rounds.
    """
    results = []
    for start in range(0, len(cases), together):
        group = [
            Live(
                case, setting, ranks, turns, pairs.get(case, PAIRS), folder / f"{ranks}-{start + i}"
            )
            for i, case in enumerate(cases[start : start + together])
        ]
        failed: dict[str, str] = {}
        try:
            for number in range(turns):
                for live in group:
                    if live.case not in failed:
                        try:
                            live.turn(number, idle_seconds)
                        except WorkerFailed as error:
                            failed[live.case] = str(error)
                    progress(1)
            for live in group:
                if live.case in failed:
                    found: dict[str, Any] = {"name": live.case, "error": failed[live.case]}
                else:
                    found = live.result()
                results.append({**found, "group": f"{folder.name}-{start // together}"})
        finally:
            for live in group:
                live.close()
    assert all(result["name"] in CASES for result in results)
    return results
