"""Run the parts' pieces in forked processes, and add up their outcomes."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.campaign import forks, results
from tests.campaign.outcome import Outcome
from tests.campaign.parts import PARTS, Piece, Prepared, pieces
from tests.campaign.warm import warm

_SPARE_SECONDS = 120.0
"""Time that a piece may take beside its trials: the first use of everything, on a busy machine."""


class Campaign:
    """The process that runs the parts; imports, warms up and prepares everything once.

    Args:
        parts: names of the parts to run.
        processes: pieces that run at once.
    """

    def __init__(self, seed: int, parts: list[str], processes: int) -> None:
        self._seed = seed
        self._parts = parts
        self._processes = processes
        forks.warm_up(warm)
        self._prepared = Prepared(seed, parts)

    def run(
        self, file: Path | None, first: int, trials: int | None, slice: bool = False
    ) -> dict[str, results.Row]:
        """Run all parts, one after the other, and write each part's row when the part has ended.

        Args:
            file: of results, which keeps the rows of other parts.
            first: number of the first trial of each part. A row that ends there is continued.
            trials: of each part at most; None: all from ``first`` on.
            slice: run the small choice of `make test`.
        """
        rows: dict[str, results.Row] = {}
        for part in self._parts:
            whole = self._prepared.trials(part)
            end = whole if trials is None else min(whole, first + trials)
            work = list(pieces(part, first, end))
            if slice:
                work = self._slice(part, whole)
            if not work:
                continue
            count = sum(piece.count for piece in work)
            started, cpu = time.monotonic(), _cpu_seconds()
            outcome = self._run(part, work, count)
            rows[part] = results.row_of(
                part,
                outcome,
                seed=self._seed,
                trials=count,
                seconds=time.monotonic() - started,
                cpu_seconds=_cpu_seconds() - cpu,
                processes=self._processes,
            )
            if file is not None:
                before = results.read(file)
                rows[part] = results.continued(before.get(part), rows[part], first)
                results.write(file, {**before, part: rows[part]})
        return rows

    def repeat(self, trial: int) -> dict[str, results.Row]:
        """Run one trial of a part again."""
        (part, *_) = self._parts
        outcome = self._run(part, [Piece(part, trial, 1)], 1)
        row = results.row_of(
            part, outcome, seed=self._seed, trials=1, seconds=0.0, cpu_seconds=0.0, processes=1
        )
        return {part: row}

    def close(self) -> None:
        """Remove the prepared folders."""
        self._prepared.remove()

    def _slice(self, part: str, whole: int) -> list[Piece]:
        """Choose a few trials of a part; spread the choice where the trials differ."""
        wanted = PARTS[part].slice
        if PARTS[part].trials is not None:
            size = -(-wanted // self._processes) if part != "kills-thread" else 1
            return [Piece(part, at, size) for at in range(0, wanted, size)] if wanted else []
        stride = max(1, whole // wanted)
        size = -(-wanted // self._processes)
        starts = range(0, wanted, size)
        return [Piece(part, start * stride, size) for start in starts]

    def _run(self, part: str, work: list[Piece], count: int) -> Outcome:
        total = Outcome()
        act = PARTS[part].act

        def one(piece: Piece, folder: Path) -> Any:
            done = act(self._seed, piece.first, piece.count, folder, self._prepared.folder)
            return done.to_json()

        def seconds(piece: Piece) -> float:
            return _SPARE_SECONDS + PARTS[part].seconds * piece.count

        with tqdm(total=count, desc=part, unit="trial", file=sys.stderr, mininterval=1.0) as bar:
            for piece, answer, problem in forks.run_all(work, one, self._processes, seconds):
                if answer is not None:
                    total.add(Outcome.from_json(answer))
                else:
                    total.fail(piece.first, "hung", f"trials from {piece.first} on: {problem}")
                bar.update(piece.count)
                bar.set_postfix(failures=len(total.failures))
        return total


def _cpu_seconds() -> float:
    """Return the CPU time of all child processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
