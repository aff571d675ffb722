"""Run a drawn program: once without an end or a Checkpointer, and again killed and restored."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_sweep import alone
from tests.distributed.layouts import Layout
from tests.distributed.test_tracking_zoo import no_streams
from tests.programs.live import Live, differences, generators, live
from tests.unit.drawn_programs.programs import STEPS, Program
from tests.unit.drawn_programs.training import Training
from tests.unit.operations.lives import Compaction
from torchrec_checknrun import (
    Checkpointer,
    CheckpointReport,
    Images,
    PartialRecovery,
    PrioritySaves,
    Quantization,
    RestoreReport,
    RngState,
)
from torchrec_checknrun.compaction.compact import compact_in
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.run import going_on
from torchrec_checknrun.run.compaction import Copied
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.store.folder import Folder

QUANTIZATIONS: dict[str, Quantization | None] = {
    "none": None,
    "compressed": Quantization(compress=True),
    "small_tables": Quantization(bits=8, exact_below_rows=1000),
}


@dataclass
class Outcome:
    """The outcome of a program.

    Attributes:
        refused: the error that a restore, a save or the making of a Checkpointer gave, if one did.
        invalid: the error that the program ends in without a Checkpointer, if it does.
        lost: differences, of the end or of a checkpoint.
        facts: what else was met.
        warnings: what the package has logged; failed checkpoints are errors.
    """

    refused: str | None = None
    invalid: str | None = None
    lost: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Return the errors of checkpoints that were not committed."""
        return [line for line in self.warnings if line.startswith("ERROR")]


@dataclass
class Cut:
    """All that was live when a checkpoint was cut, and the place in the data."""

    live: Live
    position: int


class Runs:
    """The lives of one run, each of new objects of other first values.

    Attributes:
        cuts: by checkpoint that was begun.
        committed: the reports of all checkpoints.
        done: the last turn whose end no gradient waited at.
    """

    from_images = ("images",)
    """Ways on which memory is found."""

    def __init__(self, program: Program, folder: Path, outcome: Outcome) -> None:
        self.program, self.outcome = program, outcome
        self.root, self.memory = folder / "root", folder / "memory"
        self.memory.mkdir(exist_ok=True)
        self.cuts: dict[str, Cut] = {}
        self.committed: list[CheckpointReport] = []
        self.done = 0
        self._seen: object = None
        self._saver: Checkpointer | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of the Checkpointer, beside root, model and state."""
        p = self.program
        survive = None if p.survive is None else Images(folder=str(self.memory))
        partial = None
        if p.survive == "priority":
            partial = PartialRecovery(
                max_pls=1.0, total_steps=STEPS, priority=PrioritySaves(2, fraction=0.5)
            )
        return {
            "policy": p.policy,
            "staging": p.staging,
            "when_busy": p.when_busy,
            "dense": p.dense_form,
            "quantization": QUANTIZATIONS[p.quantization],
            "chunk_bytes": p.chunk_bytes,
            "compact_after": p.compact_after,
            "every_steps": p.every,
            "survive": survive,
            "partial": partial,
            "retention": None,
            "max_failures": 3,
            "callbacks": [self.committed.append],
        }

    def training(self, seed: int, at: int) -> Training:
        """Make the objects of a life."""
        return Training(self.program, seed, at)

    def cut(self, training: Training, id: str) -> None:
        """Take a copy of all that is live, when a checkpoint was begun."""
        self.cuts[id] = Cut(everything(training), training.place.position)

    def state(self, training: Training) -> dict[str, Any]:
        """Return the state objects that a Checkpointer is given."""
        return {"rng": RngState(), **training.state}

    def saver(self, training: Training, **options: Any) -> Checkpointer:
        files._mapped.clear()
        state = self.state(training)
        self._saver = Checkpointer(self.root, model=training.model, state=state, **options)
        return self._saver

    def there(self) -> list[str]:
        """Return the committed checkpoints, in the order of their numbers."""
        return [each.id for each in sorted(self.committed, key=lambda report: report.sequence)]

    def begin(self, seed: int, way: str) -> tuple[Training, Checkpointer]:
        """Make everything anew, and restore."""
        there = self.there()
        newest = there[-1] if there else None
        if way == "older" and there:
            newest = there[(len(there) - 1) // 2]
        at = 0 if newest is None else self.cuts[newest].position
        if way in self.from_images:
            at = self.done
        training = self.training(seed, at)
        saver = self.saver(training, **self.options())
        report = saver.restore(newest if way == "older" else None)
        source = "nothing" if report is None else report.source
        if source != way and way in ("images", "checkpoint"):
            self.outcome.facts.append(f"restored from {source} instead of {way}")
        if report is None and seed:
            assert newest is None, "a checkpoint was committed, and there is none"
            self.die()
            return self.begin(0, "fresh")
        if report is not None:
            if source == "checkpoint" and newest is not None:
                at = self.cuts[newest].position
            elif source != "checkpoint":
                at = self.done
            found = training.place.position
            assert found == at, f"at {found}, not {at}, by {source}"
            if source == way == "checkpoint" and self.program.saves == "two_in_a_row":
                again = saver.save()
                if not again.unchanged:
                    self.outcome.facts.append("a save after a restore is no longer unchanged")
                    self.cut(training, again.id)
            self.restored(training, report)
            training.habit.after_step(found)  # which came after what was restored
        return training, saver

    def restored(self, training: Training, report: RestoreReport) -> None:
        """Look at what was restored."""

    def go_on(self, training: Training, saver: Checkpointer, until: int) -> None:
        """Train and save until a turn has been done."""
        program = self.program
        while training.place.position < until:
            training.turn(saver)
            number = training.place.position
            if number % 3 == 2:
                self._save(training, saver)
            saver.step()
            self._note(training, saver)
            if not saver._saver.gradients_wait:
                self.done = number
            if number % 3 == 1 and program.saves == "two_in_a_row":
                for _ in range(2):
                    self._save_now(training, saver)
            training.habit.after_step(number)

    def _save(self, training: Training, saver: Checkpointer) -> None:
        if self.program.saves == "before_step":
            self._save_now(training, saver)
        elif self.program.saves == "unwaited":
            saver.save(wait=False)
            self._note(training, saver)

    def _save_now(self, training: Training, saver: Checkpointer) -> None:
        if saver._saver.gradients_wait:
            return
        report = saver.save()
        if not report.unchanged:
            self.cut(training, report.id)

    def _note(self, training: Training, saver: Checkpointer) -> None:
        """Take a copy if the last call has begun a checkpoint."""
        save = saver._saver.running
        if save is not None and save is not self._seen:
            self.cut(training, save.proposal.id)
            self._seen = save

    def die(self) -> None:
        """End the life as a killed process does: nothing is closed or saved."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver._saver.settle(wait=True)
            saver._release(failed=True)

    def lose_images(self) -> None:
        for path in self.memory.iterdir():
            path.unlink()


def everything(training: Training) -> Live:
    """Return all that is live of a program."""
    found = live({"model": training.model, "training": training, "generators": generators()})
    return {path: value for path, value in found.items() if not OF_PROCESSES.search(path)}


OF_PROCESSES = re.compile(
    r"_has_rebuilt_buckets|_lazy_init_ran|_static_graph_delay|require_forward_param_sync"
    r"|\.differentiable$|defaults\.lr$|\._history_"
)
"""Attributes of DistributedDataParallel's, which say what this process has done, an option that
PyTorch adds when an optimizer of any kind is loaded, the rate that an optimizer was made with,
which is a schedule's tensor until it is loaded, and room for ids that evictions will look at, where
old ones are left over.
"""
OF_TURNS = re.compile(
    r"\.grad\b|_has_uninitialized_input_dist|_vbe_B_offsets|_features_order|_numel_cache"
    r"|is_pipelined|_pre_processed|scaler\._(scale|growth_tracker)$"
)
"""Remains of a turn, and what TorchRec, PyTorch's LBFGS and GradScaler make in a first one."""


def differences_at_rest(found: Live, wanted: Live) -> list[str]:
    """Return the differences of what was restored, leaving out what a turn leaves behind.

    What is one object after a turn may be two after a restore, until the next turn: where either
    side has one that was met before, that one is compared alone.
    """
    twice = {path for each in (found, wanted) for path, v in each.items() if v.startswith("is ")}

    def at_rest(all_of_it: Live) -> Live:
        return {
            path: value
            for path, value in all_of_it.items()
            if not OF_TURNS.search(path) and twice.isdisjoint(_prefixes(path))
        }

    return differences(at_rest(found), at_rest(wanted))


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def undisturbed(program: Program, layout: Layout | None = None) -> Live:
    """Run a program to its end without a Checkpointer."""
    training = Training(program, 0, layout=layout)
    while training.place.position < STEPS:
        training.turn(None)
        training.habit.after_step(training.place.position)
    return everything(training)


def outcome_of(program: Program, folder: Path) -> Outcome:
    """Run a program without an end, and again killed and restored; compare all of it."""
    outcome = Outcome()
    with quiet(outcome.warnings):
        try:
            wanted = undisturbed(program)
        except Exception as error:
            outcome.invalid = f"{type(error).__name__}: {error}"
            return outcome
        runs = Runs(program, folder, outcome)
        try:
            _compare(program, runs, wanted)
        except AssertionError as error:
            outcome.lost.append(f"{place(error)}: {error}")
        except (CheckNRunError, ValueError) as error:
            outcome.refused = f"{type(error).__name__}: {error}"
            if isinstance(error, ValueError) and not isinstance(error, CheckNRunError):
                outcome.refused = f"{place(error)} {outcome.refused}"
        finally:
            if runs._saver is not None:
                runs._saver._release(failed=True)
    return outcome


def place(error: BaseException) -> str:
    """Name the line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _compare(program: Program, runs: Runs, wanted: Live) -> None:
    training, saver = runs.begin(0, "fresh")
    stop = program.kill
    for seed, way in enumerate(program.ways, 1):
        runs.go_on(training, saver, stop)
        if program.torn:
            training.tear()
        runs.die()
        if way != "images":
            runs.lose_images()
        training, saver = runs.begin(seed, way)
        stop = min(STEPS - 1, stop + 2)
    runs.go_on(training, saver, STEPS)
    lost = runs.outcome.lost
    lost += [f"at the end: {line}" for line in differences(everything(training), wanted)]
    runs.die()
    _compare_checkpoints(program, runs)


def _compare_checkpoints(program: Program, runs: Runs) -> None:
    there = {report.id: report for report in runs.committed}
    runs.lose_images()
    for seed, id in enumerate(sorted(there), 50):
        cut = runs.cuts[id]
        training = runs.training(seed, cut.position)
        with runs.saver(training) as saver:
            saver.restore(id)
            lines = differences_at_rest(everything(training), cut.live)
        runs.outcome.lost += [f"checkpoint of {there[id].step}: {line}" for line in lines]


class Lines(logging.Handler):
    """Keep what the package logs, from warnings on."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.found.append(f"ERROR {line}" if record.levelno >= logging.ERROR else line)


def compact_now(root: Folder, original: Manifest) -> Copied:
    """Compact a chain in this process."""
    try:
        report = compact_in(root, original.id)
    except (CheckNRunError, OSError):
        return Copied(original.id, None)
    return Copied(original.id, None if report is None else read_manifest(root, report.id))


@contextmanager
def quiet(warnings: list[str]) -> Iterator[None]:
    """Run in a group of one rank, without streams, with compactions in this process."""
    logger, lines = logging.getLogger("torchrec_checknrun"), Lines(warnings)
    with alone(), no_streams(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "propagate", False)
        logger.addHandler(lines)
        Compaction.compact = compact_now
        patch.setattr(going_on, "CompactionProcess", Compaction)
        try:
            yield
        finally:
            logger.removeHandler(lines)


def run_in(folder: Path, program: Program) -> Outcome:
    """Run a program in a folder that is deleted afterwards."""
    folder.mkdir()
    try:
        return outcome_of(program, folder)
    finally:
        shutil.rmtree(folder)
