"""The one object a training loop holds: it decides when, and calls the rooms below in order."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Literal, get_args

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.background import Background, BackgroundKind, Save
from torchrec_checknrun.chain import highest_sequence
from torchrec_checknrun.errors import (
    CheckNRunError,
    ModelPartlyRestored,
    SaveFailed,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.fit import Fit
from torchrec_checknrun.gradients import PendingGradients
from torchrec_checknrun.lineage import Lineage, Proposal
from torchrec_checknrun.per_rank import PerRank
from torchrec_checknrun.policy import Decision, OneShot, Policy
from torchrec_checknrun.quantization import Quantization
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.report import CheckpointReport, RestoreReport, checkpoint_report
from torchrec_checknrun.restore import Target, restore
from torchrec_checknrun.snapshot import CHUNK_BYTES, MODEL, Snapshot, take_snapshot
from torchrec_checknrun.staging import StagingMode
from torchrec_checknrun.tracked import RowIds, TrackedModel, track
from torchrec_checknrun.tracking import Consumer, Cut

logger = logging.getLogger(__name__)

Callback = Callable[[CheckpointReport], None]

_MARKS = {
    Decision.FULL: None,
    Decision.SINCE_BASELINE: Consumer.BASELINE,
    Decision.SINCE_LAST: Consumer.LAST,
}


@dataclass(frozen=True)
class _Facts:
    """What a rank says when a checkpoint is due."""

    step: int
    waiting: bool
    """Gradients wait for their optimizer."""
    busy: bool
    """A checkpoint is still being written."""
    failed: bool
    """The last one was not committed, and the caller doesn't know yet."""
    proposal: Proposal | None
    """Rank 0's."""


class Checkpointer:
    """Saves a TorchRec model and all it needs to go on, and restores it.

    Made on all ranks at once, after the model is sharded; ``restore``, ``step``, ``save`` and
    ``close`` are called on all ranks at the same point of the training loop.

    Args:
        root: folder or fsspec URL of this run's checkpoints.
        model: DistributedModelParallel (or any module with sharded embedding collections). Its
            sharded tables and their fused optimizer state are saved by rows, the rest in full.
        state: whatever else belongs to the run, by name: optimizer, reader, progress … Each is the
            same on all ranks, or wrapped in ``PerRank``. Content: see ``state.encode_state``.
            (``model.reshard`` makes TorchRec's fused optimizers anew, with step 0 and the first
            learning rate, and you a new CombinedOptimizer. The one given here serves on, but keeps
            the old tables in memory: in a job that reshards, give the dense optimizer alone.)
        policy: which rows a checkpoint holds.
        quantization: in how many bits; exact by default.
        every_steps: ``step`` saves at every so many steps; None: only ``save`` does.
        callbacks: called on all ranks with the report of every committed checkpoint.
        background: who encodes and writes while training goes on: a ``thread``, or a ``process``,
            which disturbs training less.
        staging: what training waits for: rows are copied out of the tables (``copy``) or encoded on
            the way (``encode``: less memory); ``auto``: for each table whichever a trial finds
            faster.
        memory_budget: bytes for what is on its way to storage, on this rank; None: a quarter of the
            memory that is free, shared by the machine's ranks. What doesn't fit is staged in parts,
            while training waits.
        when_busy: what ``step`` does when a checkpoint is due while one is being written: ``skip``
            it (its rows are part of the next one), or ``wait``.
        max_failures: how many background failures in a row are only logged.
        timeout_seconds: how long a rank waits for the others in a save or restore.
        chunk_bytes: memory for the rows of a chunk, with every copy of them that is made while it
            is saved; a restore takes as much.

    Raises:
        UnsupportedTable: see ``track``.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: nn.Module,
        state: Mapping[str, Stateful | PerRank] | None = None,
        policy: Policy | None = None,
        quantization: Quantization | None = None,
        every_steps: int | None = None,
        background: BackgroundKind = "thread",
        staging: StagingMode = "auto",
        memory_budget: int | None = None,
        when_busy: Literal["skip", "wait"] = "skip",
        max_failures: int = 0,
        callbacks: Sequence[Callback] = (),
        timeout_seconds: float = 1800.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        declared = dict(state or {})
        if MODEL in declared:
            raise ValueError(f"state may not be called {MODEL!r}: that is the model's own name")
        for name, item in declared.items():
            stateful = item.state if isinstance(item, PerRank) else item
            if not isinstance(stateful, Stateful):
                raise ValueError(
                    f"state {name!r} is a {type(stateful).__name__} without state_dict() and "
                    "load_state_dict(): wrap it in an object that has them"
                )
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, or None, not {every_steps}")
        if chunk_bytes < 1 or timeout_seconds <= 0 or max_failures < 0:
            raise ValueError(
                "chunk_bytes and timeout_seconds must be positive, max_failures not negative"
            )
        for name, value, choices in (
            ("background", background, get_args(BackgroundKind)),
            ("staging", staging, get_args(StagingMode)),
            ("when_busy", when_busy, ("skip", "wait")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, not {value!r}")
        self.root = Folder(root)
        self.steps = 0
        """Optimizer steps done, counted by ``step`` and restored with a checkpoint."""
        self._policy = policy or OneShot()
        self._quantization = quantization or Quantization()
        self._every_steps = every_steps
        self._callbacks = tuple(callbacks)
        self._when_busy = when_busy
        self._max_failures = max_failures
        self._failures = 0
        states = {n: s.state if isinstance(s, PerRank) else s for n, s in declared.items()}
        self._model = model
        self._ranks = Ranks(timedelta(seconds=timeout_seconds))
        tracked: list[TrackedModel] = []  # a table may be unsupported where it is: on one rank
        self._ranks.everywhere(lambda: tracked.append(track(model, states.values())))
        self._target = Target(
            model=model,
            tracked=tracked[0],
            states=states,
            per_rank={n: s.merge for n, s in declared.items() if isinstance(s, PerRank)},
        )
        self._lineage = Lineage()
        self._sequence: int | None = None
        """The highest sequence number in use in the root; known on rank 0 after the first look."""
        self._gradients = PendingGradients(self._target.states.values())
        self._deferred = False
        self._partly_restored: str | None = None
        timeout = timedelta(seconds=timeout_seconds)
        background_ranks = Ranks(timeout)  # all ranks make their groups in the same order
        made: list[Background] = []
        self._ranks.everywhere(
            lambda: made.append(
                Background(
                    self.root,
                    background_ranks,
                    kind=background,
                    mode=staging,
                    memory_budget=memory_budget,
                    chunk_bytes=chunk_bytes,
                    quantization=self._resolved_quantization(),
                    expected=[shard.local for shard in tracked[0].shards],
                    dense_bytes=_dense_bytes(model, tracked[0]),
                )
            )
        )
        self._background = made[0]
        self._running: Save | None = None
        self._error: BaseException | None = None
        self._report: CheckpointReport | None = None
        self._last_words = atexit.register(self._at_exit)

    def restore(
        self,
        checkpoint: str | None = None,
        *,
        verify: Literal["read", "all"] = "read",
        map: Mapping[str, str] | None = None,
        strict: bool = True,
        shrink: bool = False,
    ) -> RestoreReport | None:
        """Brings model and state objects to a checkpoint's state.

        Args:
            checkpoint: its id; None for the newest whole chain. Then a damaged checkpoint is passed
                over for the one before it, and the report says why.
            verify: ``read`` verifies each chunk as it is read; ``all`` reads everything twice, so
                that damaged data is found before anything is changed.
            map: saved table name to the model's, for tables that were renamed.
            strict: whether checkpoint and model must have the same tables, optimizers and state
                keys; if not, the report lists what was skipped.
            shrink: whether tables may have fewer rows than were saved. (More are always allowed:
                new rows keep their initialisation.) After a restore that renames, skips or resizes,
                or joins or splits columns, the next checkpoint is full.

        Returns:
            What was restored; None if the root holds no checkpoint (a fresh start).

        Raises:
            CheckpointNotFound: there is no checkpoint of that id.
            CorruptCheckpoint, ChainBroken, UnsupportedFormat: it, or all there are, can't be read;
                the model is unchanged.
            IncompatibleCheckpoint: it doesn't fit the model; the model is unchanged.
            ModelPartlyRestored: reading failed after the model was changed, and nothing else could
                be restored; ``step`` and ``save`` refuse to run from then on.
        """
        started = time.perf_counter()
        if verify not in ("read", "all"):
            raise ValueError(f"verify must be 'read' or 'all', not {verify!r}")
        target = replace(self._target, fit=Fit(map or {}, strict, shrink))
        self._settle(wait=True)
        if self._error is not None:
            logger.error("restoring after a checkpoint was not committed: %s", self._error)
            self._error = None
        try:
            found = restore(self.root, target, self._ranks, checkpoint, verify == "all")
        except BaseException as error:
            if isinstance(error, ModelPartlyRestored) or not isinstance(
                error, (CheckNRunError, OSError)
            ):
                self._partly_restored = str(error)
            raise
        self._partly_restored = None
        self._deferred = False
        if found is None:
            self._log("no checkpoint in %s: a fresh start", self.root)
            return None
        head = found.chain.head
        self.steps = head.step
        self._lineage.restored(found.chain, found.converted)
        if self._resolved_quantization() != self._quantization.resolved(0):
            self._log(
                "restored %d times from quantized rows, oftener than expected_restores=%g: rows "
                "are stored with 8 bit from now on, beginning with a full checkpoint",
                self._lineage.lossy_restores,
                self._quantization.expected_restores,
                level=logging.WARNING,
            )
        self._target.tracked.converted = False  # what ``found`` says is of the shards as they are
        report = RestoreReport(
            id=head.id,
            step=head.step,
            sequence=head.sequence,
            chain=tuple(manifest.id for manifest in found.chain.manifests),
            passed_over=tuple(found.passed_over),
            lossy=found.chain.lossy,
            seconds=time.perf_counter() - started,
            skipped=tuple(found.skipped),
        )
        for what in found.skipped:
            self._log("skipped: %s", what, level=logging.WARNING)
        for problem in found.passed_over:
            self._log("passed over: %s", problem, level=logging.WARNING)
        self._log("restored %s (step %d) in %.2f s", head.id, head.step, report.seconds)
        return report

    def step(self) -> CheckpointReport | None:
        """To be called after every training step; begins a checkpoint when one is due.

        While gradients of dense parameters wait for their optimizer (gradient accumulation), a
        checkpoint that is due is put off until a step at whose end none does.

        Returns:
            The report of a checkpoint that has become durable since the last call, if any.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: the last checkpoint was not committed, on no
                rank; its rows stay marked and the next one holds them.
            ModelPartlyRestored: a restore failed half-way before.
        """
        self._refuse_if_partly_restored()
        self.steps += 1
        self._settle(wait=False)
        due = self._every_steps is not None and self.steps % self._every_steps == 0
        if due or self._deferred:
            self._settle(wait=self._when_busy == "wait")
            self._begin()
        return self._outcome()

    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Begins a checkpoint now, after the one that is being written.

        Args:
            wait: until it is durable; if not, it becomes so while training goes on.

        Returns:
            What was saved, if ``wait``. None if gradients wait for their optimizer on any rank:
            then ``step`` will save as soon as none does.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan, ModelPartlyRestored: as ``step``.
        """
        self._refuse_if_partly_restored()
        self._settle(wait=True)
        self._begin()
        if self._error is not None or not wait:
            self._outcome()
            return None
        self._report = None
        return self.wait()

    def mark(self, table: str, rows: RowIds) -> None:
        """Marks rows that were written by hand (global ids); call it on all ranks."""
        self._target.tracked.mark(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Marks all rows of a table, or of all; call it on all ranks."""
        self._target.tracked.mark_all(table)

    def wait(self) -> CheckpointReport | None:
        """Returns when the checkpoint that was begun is durable, with its report; None if there is
        none.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: it was not committed.
        """
        self._settle(wait=True)
        return self._outcome()

    def close(self) -> None:
        """Waits, takes the hooks off the model and gives the staging memory back."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may never come: wait for nobody
            self._release()

    def _release(self) -> None:
        atexit.unregister(self._last_words)
        self._target.tracked.close()
        self._gradients.close()
        self._background.close()

    def _at_exit(self) -> None:
        """A script that ended without ``close``: what it began becomes durable, or it is told."""
        ended_by_error = getattr(sys, "last_value", None) is not None
        if self._running is not None and not ended_by_error:
            self._running.wait()
        if self._running is not None and self._running.done:
            try:
                self._running.result()
            except Exception:
                logger.exception("the last checkpoint was not committed")

    def _settle(self, wait: bool) -> None:
        """Takes note of what became of the checkpoint in the background, once that is known."""
        save = self._running
        if save is None or not (wait or save.done):
            return
        save.wait()
        self._running = None
        try:
            manifest = save.result()
        except BaseException as error:
            if save.cut is not None:
                self._target.tracked.merge(save.cut)
            self._failures += 1
            if self._failures > self._max_failures or not isinstance(error, Exception):
                self._error = error
            else:
                logger.warning("failure %d of %d: %s", self._failures, self._max_failures, error)
            return
        self._failures = 0
        self._lineage.committed(manifest)
        report = checkpoint_report(manifest, self._lineage.chain_length, save.progress)
        self._report = report
        self._log("%s", report)
        for callback in self._callbacks:
            callback(report)

    def _outcome(self) -> CheckpointReport | None:
        """What ``_settle`` has found, to be told once."""
        error, report = self._error, self._report
        self._error = self._report = None
        if error is not None:
            raise error
        return report

    def _begin(self) -> None:
        """Begins a checkpoint if all ranks can; when it returns, training may go on."""
        started = time.monotonic()
        facts = self._ranks.everywhere(self._look)
        steps = [fact.step for fact in facts]
        if len(set(steps)) > 1:
            raise SaveFailed(
                f"the ranks are at different steps {steps}: call step() or save() on all ranks at "
                "the same point of the training loop"
            )
        self._deferred = any(fact.waiting for fact in facts)
        if self._deferred:
            message = "gradients wait for their optimizer: the checkpoint of step %d is put off"
            self._log(message, self.steps, level=logging.WARNING)
            return
        if any(fact.failed for fact in facts):
            return  # whoever it failed for raises that
        if any(fact.busy for fact in facts):
            message = "the checkpoint of step %d is skipped: the one before is still being written"
            self._log(message, self.steps, level=logging.WARNING)
            return
        proposal = facts[0].proposal
        assert proposal is not None
        tracked = self._target.tracked
        tracked.unite(self._ranks.group)
        snapshot: Snapshot | Exception
        cut: Cut | None = None
        try:
            snapshot, cut = take_snapshot(
                self._model,
                tracked,
                self._target.states,
                frozenset(self._target.per_rank),
                _MARKS[proposal.decision],
            )
        except Exception as error:
            snapshot = error
        self._running = self._background.begin(
            proposal, snapshot, cut, self._resolved_quantization(), started
        )

    def _look(self) -> _Facts:
        """What this rank knows of the next checkpoint; rank 0 decides on it, if it can be."""
        tracked = self._target.tracked
        tracked.refresh()
        waiting = self._gradients.waiting or tracked.waiting
        busy = self._running is not None
        if tracked.converted:  # so it is on all ranks
            self._lineage.resharded()
            tracked.converted = False
        failed = self._error is not None
        decides = self._ranks.rank == 0 and not (waiting or busy or failed)
        return _Facts(self.steps, waiting, busy, failed, self._decide() if decides else None)

    def _decide(self) -> Proposal:
        if self._sequence is None:
            self._sequence = highest_sequence(self.root)
        self._sequence += 1
        quantization = self._resolved_quantization()
        rows = {name: shape.rows for name, shape in self._target.tracked.tables.items()}
        return self._lineage.propose(
            self._policy,
            quantization.width,
            quantization.widths(rows),
            self.steps,
            self._sequence,
        )

    def _resolved_quantization(self) -> Quantization:
        return self._quantization.resolved(self._lineage.lossy_restores)

    def _refuse_if_partly_restored(self) -> None:
        if self._partly_restored is not None:
            raise ModelPartlyRestored(
                "a restore failed half-way, and the model is no longer one state: restore again, "
                f"or start from a new model. {self._partly_restored}"
            )

    def _log(self, message: str, *values: object, level: int = logging.INFO) -> None:
        if self._ranks.rank == 0:
            logger.log(level, message, *values)


def _dense_bytes(model: nn.Module, tracked: TrackedModel) -> int:
    """About what parameters outside the tables take, with an optimizer's two states each."""
    tables = {shard.local.weight.data_ptr() for shard in tracked.shards}
    return sum(3 * p.nbytes for p in model.parameters() if p.data_ptr() not in tables)
