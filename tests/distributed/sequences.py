"""Run one life of a job, operation by operation, in the workers of ``test_sequences``.

Between the checkpointer and the storage stands a ``Gate``. At every begin a copy of the whole state
is put aside.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import lc_plain, references
from tests.distributed.gate import PATIENCE, Gate
from tests.distributed.models import Job, ModelSpec
from tests.distributed.sequence_model import Life, Way
from tests.distributed.sequence_sabotage import SABOTAGE, copy_slowly
from tests.distributed.states import State, gather, scramble
from torchrec_checknrun import (
    Checkpointer,
    CheckpointReport,
    Consecutive,
    Full,
    Intermittent,
    OneShot,
    Quantization,
)
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.policy import Policy
from torchrec_checknrun.schedule.triggers import AtEnd, Moment

POLICIES: dict[str, Policy] = {
    "full": Full(),
    "one_shot": OneShot(),
    "consecutive": Consecutive(),
    "intermittent": Intermittent(),
}
CHUNK_BYTES = 700
SMALL_BUDGET = 3 * CHUNK_BYTES
"""The smallest budget; a single item that needs more gets more."""


def quantization(life: Life) -> Quantization:
    if life.links == "lc":
        return Quantization(life.lc_bits, "lc", exact_below_rows=0)
    if life.links == "delta":
        scheme = "logdelta" if life.log_state else "fp32"
        return Quantization(
            method="delta", step=references.STEP, optimizer=scheme, exact_below_rows=0
        )
    return Quantization(life.bits, "asymmetric", exact_below_rows=0)


class Requested:
    """A trigger that is pulled by hand, on all ranks."""

    by_step = True

    def __init__(self) -> None:
        self.pulled = False

    def due(self, now: Moment) -> bool:
        return self.pulled


class Living:
    """A job and its checkpointer, and the operations that they go through.

    Args:
        ids: of all checkpoints that were begun in former lives, in order.
    """

    def __init__(
        self, where: dict[str, Any], life: Life, ids: list[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.root, self.copies = where["root"], Path(where["copies"])
        self.job = Job.build(ModelSpec.from_json(where["spec"]), where["plan"], seed=len(ids))
        self.life = life
        self.ids = list(ids)
        self._told: list[str] = []
        self._trigger = Requested()
        self.gate = Gate(patch)
        names = ("background", "staging", "when_busy", "max_failures")
        options: dict[str, Any] = {name: getattr(life, name) for name in names}
        self.saver = Checkpointer(
            self.root,
            model=self.job.model,
            retention=None,
            state={"optimizer": self.job.optimizer, "job": self.job},
            policy=POLICIES[life.policy],
            quantization=quantization(life),
            triggers=[self._trigger, *([AtEnd()] if life.at_end else [])],
            memory_budget=SMALL_BUDGET if life.in_parts else None,
            callbacks=[lambda report: self._told.append(report.id)],
            chunk_bytes=CHUNK_BYTES,
            timeout_seconds=PATIENCE,
            **options,
        )

    def train(self, steps: int) -> dict[str, Any]:
        return {"steps": [self._step() for _ in range(steps)]}

    def due(self, way: dict[str, Any]) -> dict[str, Any]:
        """Train a step at which a checkpoint is due."""
        self.job.train()
        if self.life.when_busy == "wait":
            self._let_go_soon()
        self._trigger.pulled = True
        try:
            return self._beginning(self.saver.step, way)
        finally:
            self._trigger.pulled = False

    def save_in_the_background(self, way: dict[str, Any], meanwhile: int) -> dict[str, Any]:
        """Call ``save(wait=False)``, and train while nothing but the storage holds the save."""
        self._let_go_soon()
        answer = self._beginning(lambda: self.saver.save(wait=False), way, meanwhile)
        answer["steps"] = [self._call(self.saver.step) for _ in range(meanwhile)]
        return answer

    def save(self, way: dict[str, Any]) -> dict[str, Any]:
        self._let_go_soon()
        return self._beginning(self.saver.save, way)

    def let_go(self) -> dict[str, Any]:
        """Let the held checkpoint go on to its end, while training waits for something else."""
        if self.gate.passage is not None:
            self.gate.passage.let_go()
            self.gate.passage.wait_for_end()
        dist.barrier()
        return {}

    def evict(self, which: int) -> dict[str, Any]:
        """Overwrite some rows by hand, and reset their optimizer state.

        Args:
            which: draws the rows, and their new values.
        """
        self.let_go()
        self._wait_for_copies()
        generator = torch.Generator().manual_seed(which)
        for shard in self.saver._target.tracked.shards:
            place = shard.rectangle
            ids = torch.randperm(place.rows, generator=generator)[: -(-place.rows // 4)]
            weight = torch.randn((len(ids), place.cols), generator=generator) / 100
            states = {n: s[ids].detach() * 0 for n, s in shard.local.optimizer.items()}
            shard.write_rows(ids + place.row_start, weight, states)
        return {}

    def wait(self) -> dict[str, Any]:
        self._let_go_soon()
        return {"call": self._call(self.saver.wait)}

    def restore(self, number: int | None, anything: bool) -> dict[str, Any]:
        """Restore the newest checkpoint, or another.

        Args:
            number: which of those that were begun, from 0 on; None for the newest.
            anything: whether there is one.
        """
        self._let_go_soon()
        if anything:
            self._wait_for_copies()
            scramble(self.job)
        report = self.saver.restore(None if number is None else self.ids[number])
        self._told.clear()
        if report is None:
            return {"restored": None, "problems": [], "digest": ""}
        assert self.saver.steps == report.step
        return {"restored": report.id, **compare(self.job, self.root, self.copies, report.id)}

    def close(self, way: dict[str, Any]) -> dict[str, Any]:
        self._let_go_soon()
        return self._beginning(self.saver.close, way)

    def abandon(self) -> dict[str, Any]:
        """End as if the process were gone: nothing that it still does reaches the storage."""
        with pytest.raises(InterruptedError), self.saver:
            raise InterruptedError
        if (passage := self.gate.passage) is not None:
            passage.cut_short = True
            passage.let_go()
            passage.wait_for_end()
        return {}

    def kill(self, let_go: bool) -> None:
        """Send SIGKILL to this rank, on all ranks; perhaps after the held save went on."""
        if let_go and self.gate.passage is not None:
            self.gate.passage.let_go()
            time.sleep(0.004 * len(self.ids))
        os.kill(os.getpid(), signal.SIGKILL)

    def _step(self) -> dict[str, Any]:
        self.job.train()
        return self._call(self.saver.step)

    def _beginning(
        self, call: Callable[[], CheckpointReport | None], way: dict[str, Any], meanwhile: int = 0
    ) -> dict[str, Any]:
        """Make a call that may begin a checkpoint; return once that one is held or at its end."""
        before = self.gate.passage
        self.gate.next = Way.from_json(way)
        state = gather(self.job)
        answer = self._call(call)
        self.job.train(meanwhile)
        passage = self.gate.passage
        if passage is before:
            return {"call": answer, "begun": None}
        assert passage is not None
        assert passage.save is not None
        self.ids.append(passage.save.proposal.id)
        self._put_aside(state)
        passage.wait()
        progress = passage.save.progress
        return {
            "call": answer,
            "begun": self.ids[-1],
            "in_parts": progress.in_parts,
            "copied_on_write": passage.on_write and not progress.copied_at_cut,
            "protected": progress.protection.rows > 0,
        }

    def _put_aside(self, state: State) -> None:
        if dist.get_rank() == 0:
            references.store(self.copies / f"{self.ids[-1]}.npz", state)

    def _call(self, call: Callable[[], CheckpointReport | None]) -> dict[str, Any]:
        self._told.clear()
        try:
            report = call()
        except SaveFailed:
            return {"error": True, "report": None, "told": list(self._told)}
        return {"error": False, "report": report and report.id, "told": list(self._told)}

    def _wait_for_copies(self) -> None:
        """Wait until all rows of a save are copied: writing by hand would fail the save."""
        passage = self.gate.passage
        rows = passage.save.rows if passage is not None and passage.save is not None else None
        deadline = time.monotonic() + PATIENCE
        while rows is not None and not rows.copies.over:
            assert time.monotonic() < deadline, "the rows are never copied"
            time.sleep(0.001)

    def _let_go_soon(self) -> None:
        """Let the held checkpoint go in a moment, for calls that wait for it."""
        if self.gate.passage is not None:
            threading.Timer(0.002, self.gate.passage.let_go).start()


def compare(job: Job, root: str, copies: Path, name: str) -> dict[str, Any]:
    """Compare a restored job with the copy that was put aside, and hash its state."""
    state = gather(job)
    wanted = references.load(copies / f"{name}.npz")
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode() + state[key].tobytes())
    links, lost = references.links_of(Path(root), name), list[str]()
    if links == "lc":
        rows, lost = lc_plain.restored(Path(root), copies, name)
        wanted |= rows
    bits = None if links else references.narrowest_bits(Path(root), name)
    linked = links == "delta"
    log_state = linked and references.has_log_state(Path(root), name)
    problems = lost + references.differences(state, wanted, bits, linked, log_state)
    return {"problems": problems, "digest": digest.hexdigest(), "step": job.steps}


def live(
    where: dict[str, Any],
    life: dict[str, Any],
    ids: list[str],
    script: list[list[Any]],
    sabotage: str | None = None,
) -> list[dict[str, Any]]:
    """Go through a script of operations; return the outcome of each.

    Args:
        where: ``root``, ``copies``, ``spec`` and ``plan``.
        script: names of ``Living``'s methods, each with its arguments.
    """
    done: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        copy_slowly(patch, 0.002)
        if sabotage is not None:
            SABOTAGE[sabotage](patch)
        living = Living(where, Life(**life), ids, patch)
        for name, arguments in script:
            dist.barrier()  # else what one rank lets go another one may hear of too early
            if name == "kill":
                leave(where, done)
            done.append(getattr(living, name)(**arguments))
    return done


def leave(where: dict[str, Any], done: list[dict[str, Any]]) -> None:
    """Write the outcomes to a file, for when the process can't return them."""
    Path(where["copies"], f"rank{dist.get_rank()}.json").write_text(json.dumps(done))
    dist.barrier()
