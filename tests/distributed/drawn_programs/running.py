"""Run a drawn program on worker processes, life by life, and compare all of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.distributed.drawn_programs.lives import live, look, undisturbed
from tests.distributed.drawn_programs.programs import Ranked
from tests.distributed.worker_pool import CaseFailed, WorkerPool
from tests.unit.drawn_programs.running import Outcome

Workers = Callable[[int], WorkerPool]
SECONDS = 200.0


def run_in(workers: Workers, folder: Path, ranked: Ranked, sabotage: str | None = None) -> Outcome:
    """Run a program in a folder that is deleted afterwards.

    Args:
        sabotage: what is broken, by name.
    """
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="drawn-", dir="/dev/shm") as memory:
        (folder / "memory").symlink_to(memory)
        try:
            return _Run(workers, folder, ranked, sabotage).outcome()
        finally:
            shutil.rmtree(folder)


class _Run:
    def __init__(
        self, workers: Workers, folder: Path, ranked: Ranked, sabotage: str | None
    ) -> None:
        self._workers, self._folder, self._ranked = workers, folder, ranked
        self._sabotage = sabotage
        self._found = Outcome()

    def outcome(self) -> Outcome:
        ranked, found = self._ranked, self._found
        if ranked.repeats:
            self._on(ranked.layout(0).world_size, undisturbed)
        for life in range(ranked.lives):
            if not self._ended:
                ranks = ranked.layout(life).world_size
                self._on(ranks, live, life=life, sabotage=self._sabotage)
        layouts = {str(each): each for each in map(ranked.layout, range(ranked.lives))}
        if not ranked.keeps_its_ranks:
            other = ranked.drawn_layout(1 + ranked.plan % 2, 50)
            layouts.setdefault(str(other), other)
        for layout in layouts.values():
            if not self._ended:
                self._on(layout.world_size, look, layout=asdict(layout))
        return found

    @property
    def _ended(self) -> bool:
        found = self._found
        return bool(found.refused or found.invalid or found.lost)

    def _on(self, ranks: int, function: Callable[..., Any], **arguments: Any) -> None:
        """Run a case on some ranks, and add its outcome."""
        given = {"folder": str(self._folder), "ranked": self._ranked.to_json(), **arguments}
        try:
            answers = self._workers(ranks).run(function, timeout=SECONDS, **given)
        except CaseFailed as error:
            paths = sorted(self._folder.glob("outcome.*.json"))
            answers = [json.loads(path.read_text()) for path in paths]
            for path in paths:
                path.unlink()
            # The others' errors are of connections that were closed.
            own = [a for a in answers if "gloo" not in f"{a['invalid']}{a['refused']}{a['lost']}"]
            answers = own or answers
            if not answers:
                self._found.lost.append(f"a worker died: {error}")
        for rank, answer in enumerate(answers):
            self._add(rank, Outcome(**answer))

    def _add(self, rank: int, of_rank: Outcome) -> None:
        found = self._found
        found.refused = found.refused or of_rank.refused
        found.invalid = found.invalid or of_rank.invalid
        found.lost += [f"{line} (rank {rank})" for line in of_rank.lost]
        found.facts += of_rank.facts
        found.warnings += of_rank.warnings
