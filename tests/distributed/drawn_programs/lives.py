"""Live one life of a drawn program on this rank; look at its checkpoints on any layout."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.drawn_programs.programs import Ranked
from tests.distributed.drawn_programs.runs import RankRuns
from tests.distributed.drawn_programs.sabotage import broken
from tests.distributed.layouts import Layout
from tests.distributed.sequence_sabotage import copy_slowly
from tests.programs.live import differences
from tests.unit.drawn_programs import running
from tests.unit.drawn_programs.programs import STEPS
from tests.unit.drawn_programs.running import Outcome, everything, quiet
from torchrec_checknrun.save import background


def live(folder: str, ranked: dict[str, Any], life: int, sabotage: str | None) -> dict[str, Any]:
    """Live one life; return its outcome, unless it ends by SIGKILL, when that is in a file."""
    program = Ranked.from_json(ranked)
    layout = program.layout(life)

    def act(outcome: Outcome) -> None:
        runs = RankRuns(program, Path(folder), outcome, layout)
        ways = ("fresh", *program.program.ways)
        if life and ways[life] != "images":
            runs.lose_images()
        training, saver = runs.begin(life, ways[life])
        if life + 1 < program.lives:
            stop = min(STEPS - 1, program.program.kill + 2 * life)
            runs.go_on(training, saver, stop)
            runs.note(training)
            runs.tear(training)
            if program.closed:
                runs.close(training, saver)
            elif not program.killed:
                runs.die()
            return
        runs.go_on(training, saver, STEPS)
        if any(bool(each.isnan().any()) for each in training.model.parameters()):
            outcome.facts.append("values are not numbers")
        if program.repeats:
            wanted = pickle.loads(_end(Path(folder)).read_bytes())
            lines = differences(everything(training), wanted)
            outcome.lost += [f"at the end: {line}" for line in lines]
        runs.die()

    with broken(sabotage), pytest.MonkeyPatch.context() as patch:
        if program.slow:
            copy_slowly(patch, 0.002)
        if program.fails:
            second_file_fails(patch)
        return _acted(folder, act, life + 1 < program.lives and program.killed)


def second_file_fails(patch: pytest.MonkeyPatch) -> None:
    """Let the last rank find no space for the second file that it writes."""
    write, calls = background.write_rank_file, itertools.count()

    def fail(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 1 and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ENOSPC, "no space left, says the test")
        return write(*arguments, **more)

    patch.setattr(background, "write_rank_file", fail)


def look(folder: str, ranked: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Restore all checkpoints on some layout, and compare them with what was cut."""
    program = Ranked.from_json(ranked)

    def act(outcome: Outcome) -> None:
        runs = RankRuns(program, Path(folder), outcome, Layout.from_json(layout))
        for seed, id in enumerate(runs.there(), 50):
            training = runs.training(seed, runs.cuts[id].position)
            with runs.saver(training) as saver:
                saver.restore(id)
                lines = runs.lost_of(training, id)
            outcome.lost += [f"checkpoint {id} on {layout}: {line}" for line in lines]

    return _acted(folder, act, killed=False)


def undisturbed(folder: str, ranked: dict[str, Any]) -> dict[str, Any]:
    """Keep what is live at the end of a run without a Checkpointer."""
    program = Ranked.from_json(ranked)
    outcome = Outcome()
    try:
        with quiet(outcome.warnings):
            wanted = running.undisturbed(program.program, program.layout(0))
            _end(Path(folder)).write_bytes(pickle.dumps(wanted))
    except Exception as error:
        outcome.invalid = f"{type(error).__name__}: {error}"
        _leave(folder, outcome)
        raise
    return asdict(outcome)


def _end(folder: Path) -> Path:
    return folder / f"end.{dist.get_rank()}.pickle"


def _leave(folder: str, outcome: Outcome) -> None:
    path = Path(folder) / f"outcome.{dist.get_rank()}.json"
    path.write_text(json.dumps(asdict(outcome)))


def _acted(folder: str, act: Callable[[Outcome], None], killed: bool) -> dict[str, Any]:
    """Act; note errors, which end this process and the other ranks' with it."""
    outcome = Outcome()
    try:
        with quiet(outcome.warnings):
            act(outcome)
    except AssertionError as error:
        outcome.lost.append(f"{running.place(error)}: {error}")
        _leave(folder, outcome)
        raise
    except Exception as error:
        outcome.refused = f"{running.place(error)} {type(error).__name__}: {error}"
        _leave(folder, outcome)
        raise
    if killed:
        _leave(folder, outcome)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return asdict(outcome)
