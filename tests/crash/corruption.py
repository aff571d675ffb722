"""Damage every file of a chain in every way, and judge what ``verify`` and a restore make of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from tests.crash.save_sweep import SPEC
from tests.distributed import references
from tests.distributed.models import Job, uniform_plan
from tests.distributed.states import State, gather, scramble
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format import reader as read_chunks
from torchrec_checknrun.format.manifest import parse_manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.tools.verify import verify

LENGTH = 3
FLIPS = 8
"""Flipped bytes in each file: at its ends, and evenly between."""


@dataclass(frozen=True)
class Damage:
    """A damage to a copy of the run.

    Attributes:
        checkpoint: the damaged one of the chain, 0 for the baseline.
        file: its file.
    """

    checkpoint: int
    file: str
    how: str
    at: int = 0

    def __str__(self) -> str:
        return f"{self.how} {self.file} of checkpoint {self.checkpoint} at {self.at}"


@dataclass
class Found:
    """The outcome of a sweep.

    Attributes:
        tried: number of damages.
        restored_older: number after which a restore had to fall back; the others left all that it
            needed.
    """

    tried: int = 0
    named: int = 0
    restored_older: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class CorruptionSweep:
    """A run with a chain of three checkpoints, and another lineage's beside it to swap with.

    Args:
        folder: an empty one, for everything.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        plan = uniform_plan(SPEC, "table_wise", 1)
        self._job = Job.build(SPEC, plan)
        self._reader = Job.build(SPEC, plan, seed=5)
        self._states: list[State] = []
        self.ids = self._write(folder / "sound", self._states)
        self._others = self._write(folder / "other", [])

    def _write(self, root: Path, states: list[State]) -> list[str]:
        ids = []
        self._job.steps = 0
        with _checkpointer(root, self._job, policy=Consecutive()) as saver:
            for _ in range(LENGTH):
                self._job.train()
                saver.steps += 1
                report = saver.save()
                assert report is not None
                ids.append(report.id)
                states.append(gather(self._job))
        return ids

    def damages(self) -> Iterator[Damage]:
        """Yield every damage."""
        for age, id in enumerate(self.ids):
            for file in sorted((self._folder / "sound" / id).iterdir()):
                size = file.stat().st_size
                for number in range(FLIPS):
                    yield Damage(age, file.name, "flip", number * (size - 1) // (FLIPS - 1))
                for length in (0, size // 2, size - 1):
                    yield Damage(age, file.name, "truncate", length)
                yield Damage(age, file.name, "lengthen", size)
                for how in ("delete", "swap", "older version"):
                    yield Damage(age, file.name, how)
            yield Damage(age, "", "duplicate")
            yield Damage(age, "", "delete")

    def run(self, damages: Iterator[Damage]) -> Found:
        """Try each damage in turn."""
        found = Found()
        with mock.patch.object(read_chunks, "VISIBLE_SECONDS", 0.0):
            for damage in damages:
                found.tried += 1
                found.kinds[damage.how] = found.kinds.get(damage.how, 0) + 1
                try:
                    problems = self._try(damage, found)
                except Exception as error:
                    problems = [repr(error)]
                found.lost += [f"{damage}: {problem}" for problem in problems]
        return found

    def _try(self, damage: Damage, found: Found) -> list[str]:
        root = self._folder / "damaged"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self._folder / "sound", root)
        name = self._apply(root, damage)
        problems = [] if self._is_named(root, damage, name) else ["it is not detected and named"]
        found.named += not problems
        # A restore reads only what it needs; whatever it reads, it gives one checkpoint's state.
        newest = LENGTH - 1
        lowest = newest if damage.how == "duplicate" else damage.checkpoint - 1
        with _checkpointer(root, self._reader) as reader:
            scramble(self._reader)
            try:
                report = reader.restore()
            except CheckNRunError as error:
                if lowest >= 0 or self.ids[damage.checkpoint] not in str(error):
                    problems.append(f"nothing is restored: {error}")
                return problems
            if report is None or report.id not in self.ids:
                return [*problems, f"restored {report}"]
            at = self.ids.index(report.id)
            found.restored_older += at < newest
            problems += references.differences(gather(self._reader), self._states[at], None)
            if at not in (lowest, newest):
                problems.append(f"restored checkpoint {at}")
            told = " ".join(report.passed_over)
            uncommitted = damage.how == "delete" and damage.checkpoint == newest
            uncommitted = uncommitted and damage.file in ("", MANIFEST_NAME)
            if at < newest and self.ids[damage.checkpoint] not in told and not uncommitted:
                problems.append(f"what was passed over is not named: {told}")
        return problems

    def _apply(self, root: Path, damage: Damage) -> str:
        """Apply a damage; return the directory that is damaged then."""
        id = self.ids[damage.checkpoint]
        path = root / id / damage.file
        other = self._folder / "other" / self._others[damage.checkpoint] / damage.file
        if damage.how == "flip":
            data = bytearray(path.read_bytes())
            data[damage.at] ^= 1 << random.Random(damage.at).randrange(8)
            path.write_bytes(data)
        elif damage.how == "truncate":
            path.write_bytes(path.read_bytes()[: damage.at])
        elif damage.how == "lengthen":
            path.write_bytes(path.read_bytes() + b"\0")
        elif damage.how == "swap":  # with the same file of another checkpoint of the run
            path.write_bytes((root / self.ids[damage.checkpoint - 1] / damage.file).read_bytes())
        elif damage.how == "older version":
            path.write_bytes(self._older(path, other))
        elif damage.how == "duplicate":
            id = f"seq-000009{id[10:]}"
            shutil.copytree(path, root / id)
        elif damage.how == "delete" and damage.file:
            path.unlink()
        else:
            shutil.rmtree(path)
        return id

    def _older(self, path: Path, other: Path) -> bytes:
        """Make a file that is sound and names this checkpoint, but is of another one."""
        if path.name != MANIFEST_NAME:
            return other.read_bytes()
        manifest = parse_manifest(other.read_bytes(), str(other))
        return msgspec.structs.replace(manifest, id=path.parent.name).sealed().to_bytes()

    def _is_named(self, root: Path, damage: Damage, name: str) -> bool:
        told = {found.id: " ".join(found.problems) for found in verify(root)}
        if damage.how == "delete" and damage.file in ("", MANIFEST_NAME):
            # No checkpoint is left there; those that need one say so.
            children = self.ids[damage.checkpoint + 1 :]
            return name not in told and all(name in told[child] for child in children)
        if damage.how == "older version" and damage.file == MANIFEST_NAME:
            return name in told and f"{name}/" in told[name]  # its files are not those it says
        return name in told and f"{name}/{damage.file}" in told[name]


def _checkpointer(root: Path, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    options.setdefault("retention", None)
    return Checkpointer(root, model=job.model, state=state, chunk_bytes=1000, **options)
