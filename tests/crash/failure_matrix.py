"""Fail a save in each phase on each rank: compare what all ranks hear, and look for lost rows.

``fail_everywhere`` runs on all ranks of a worker pool, with one model for all cases.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist

from tests.crash.save_sweep import Tally
from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import gather, scramble
from torchrec_checknrun import Checkpointer, Consecutive, Retention
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format import rank_file
from torchrec_checknrun.marks.row_copies import ShardCopies
from torchrec_checknrun.root import writer
from torchrec_checknrun.run import saver
from torchrec_checknrun.save import background, plan
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.snapshot import snapshot, staged
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.staging import Staging
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import Lease

SPEC = ModelSpec((CollectionSpec("c", (TableSpec("t0", 60, 8, ("f0",)),)),))
BOUND_SECONDS = 20.0
"""The longest that a failing save may take, also where a rank could wait for another one."""

PHASES: dict[str, tuple[Any, str]] = {
    "lease": (Lease, "check"),
    "decide": (writer, "highest_sequence"),
    "state": (saver, "take_snapshot"),
    "cut": (snapshot, "_own_part"),
    "plan of a rank": (CheckpointWriter, "check"),
    "plan of all": (CheckpointWriter, "create"),
    "survey": (background, "summarized_later"),
    "summary": (plan, "_summary"),
    "stage": (Staging, "_place"),
    "copy rows": (ShardCopies, "stage"),
    "check copies": (CutRows, "finish"),
    "encode": (staged.StagedJob, "encode"),
    "write a chunk": (rank_file, "_write_chunk"),
    "write the index": (rank_file, "_write_index"),
    "make the folder": (Folder, "create"),
    "finish": (CheckpointWriter, "commit"),
    "manifest": (Folder, "put"),
    "retention": (writer, "prune"),
}
ON_RANK_0 = ("lease", "decide", "plan of all", "finish", "manifest", "retention")
HARMLESS = ("retention",)
"""The checkpoint is committed all the same; what was to be deleted is deleted later."""
KINDS: dict[str, Callable[[], Exception]] = {
    "storage": lambda: OSError(errno.ENOSPC, "no space left, says the test"),
    "program": lambda: RuntimeError("out of luck, says the test"),
}


def cases(every_kind: bool = True) -> list[tuple[str, int, str]]:
    """List phase, rank and kind of error; if not with every kind, then with one in turns."""
    found = [
        (phase, rank, kind)
        for phase in PHASES
        for rank in ((0,) if phase in ON_RANK_0 else (0, 1))
        for kind in KINDS
        if (phase, kind) != ("decide", "program")
    ]
    if every_kind:
        return found
    places = list(dict.fromkeys((phase, rank) for phase, rank, _ in found))
    kinds = itertools.cycle(KINDS)
    return [
        (phase, rank, "storage" if phase == "decide" else next(kinds)) for phase, rank in places
    ]


def fail_everywhere(root: str, chosen: list[list[Any]]) -> list[dict[str, Any]]:
    """Return of each case on this rank the error told, the seconds it took, and what is wrong."""
    plan = uniform_plan(SPEC, "row_wise", dist.get_world_size())
    job, reader = Job.build(SPEC, plan), Job.build(SPEC, plan, seed=5)
    return [
        _fail(str(Path(root) / str(number)), job, reader, *case)
        for number, case in enumerate(chosen)
    ]


def _fail(root: str, job: Job, reader: Job, phase: str, rank: int, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"policy": Consecutive(), "retention": Retention(keep=1)}
    with _checkpointer(root, job, **options) as checkpointer:
        job.train()
        checkpointer.step()
        first = checkpointer.save()
        assert first is not None
        assert first.copied_at_cut == {}
        job.train()
        checkpointer.step()
        if phase == "decide":
            checkpointer._saver.writer._sequence = None
        owner, name = PHASES[phase]
        error, hit = KINDS[kind](), []

        def fail(*_: object, **__: object) -> NoReturn:
            hit.append(phase)
            raise error

        started = time.monotonic()
        told = ""
        faulty = fail if dist.get_rank() == rank else getattr(owner, name)
        with mock.patch.object(owner, name, faulty):
            try:
                checkpointer.save()
            except SaveFailed as failed:
                told = str(failed)
            seconds = time.monotonic() - started
            job.train()  # with collectives: the ranks are in step
            checkpointer.step()
            _wait_for_pruner(checkpointer)
        problems = []
        if checkpointer.save().unchanged:
            problems.append("the next save saved nothing")
        wanted = gather(job)
    with _checkpointer(root, reader) as restoring:
        scramble(reader)
        if restoring.restore() is None:
            problems.append("nothing was restored")
    problems += references.differences(gather(reader), wanted, None)
    if bool(hit) != (dist.get_rank() == rank):
        problems.append("the phase was not reached")
    return {"told": told, "seconds": seconds, "problems": problems}


def judge(answers: list[list[dict[str, Any]]], chosen: list[tuple[str, int, str]]) -> Tally:
    """Judge the answers of all ranks to all cases.

    Args:
        answers: by rank and case.
    """
    tally = Tally(len(chosen))
    for (phase, rank, kind), *of_ranks in zip(chosen, *answers, strict=True):
        tally.injected += 1
        problems = [problem for answer in of_ranks for problem in answer["problems"]]
        told = {answer["told"] for answer in of_ranks}
        if len(told) > 1:
            problems.append(f"the ranks are told different things: {told}")
        says_why = all("says the test" in text for text in told - {""})
        if (phase in HARMLESS) != (told == {""}) or not says_why:
            problems.append(f"the ranks are told {told}")
        tally.surfaced += told != {""}
        slowest = max(answer["seconds"] for answer in of_ranks)
        if slowest > BOUND_SECONDS:
            problems.append(f"it took {slowest:.1f} s")
        tally.lost += [f"{phase} fails on rank {rank} ({kind}): {p}" for p in problems]
    return tally


def _checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    return Checkpointer(
        root, model=job.model, state=state, chunk_bytes=1000, timeout_seconds=30, **options
    )


def _wait_for_pruner(checkpointer: Checkpointer) -> None:
    if checkpointer._saver.writer._pruner is not None:
        checkpointer._saver.writer._pruner.wait(60)
