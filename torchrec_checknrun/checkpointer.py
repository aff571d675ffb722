"""The one object a training loop holds: it decides when, and calls the rooms below in order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Literal

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.arguments import check_arguments
from torchrec_checknrun.background import Background, BackgroundKind
from torchrec_checknrun.errors import (
    CheckNRunError,
    ModelPartlyRestored,
    SaveFailed,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.fit import Fit
from torchrec_checknrun.per_rank import PerRank
from torchrec_checknrun.policy import Intermittent, Policy
from torchrec_checknrun.quantization import Quantization
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.report import CheckpointReport, RestoreReport
from torchrec_checknrun.restore import Target, restore
from torchrec_checknrun.retention import Retention
from torchrec_checknrun.saver import Callback, Saver
from torchrec_checknrun.schedule import Schedule
from torchrec_checknrun.snapshot import CHUNK_BYTES
from torchrec_checknrun.staging import StagingMode
from torchrec_checknrun.tracked import RowIds, TrackedModel, track
from torchrec_checknrun.triggers import EverySteps, Trigger

logger = logging.getLogger(__name__)

DEFAULT_RETENTION = Retention()


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
        every_steps: ``step`` saves at every so many steps: the trigger ``EverySteps``.
        triggers: what else makes ``step`` or ``close`` save: ``EverySeconds``, ``AtEnd``,
            ``OnSigterm``, or your own.
        callbacks: called on all ranks with the report of every committed checkpoint; what they
            raise is logged.
        background: who encodes and writes while training goes on: a ``thread``, or a ``process``,
            which disturbs training less.
        staging: what training waits for: rows are copied out of the tables (``copy``) or encoded on
            the way (``encode``: less memory); ``auto``: for each table whichever a trial finds
            faster.
        memory_budget: bytes for what is on its way to storage, on this rank; None: a quarter of the
            memory that is free, shared by the machine's ranks. What doesn't fit is staged in parts,
            while training waits. A state object is one piece: a larger one takes more, with a
            warning.
        when_busy: what ``step`` does when a checkpoint is due while one is being written: ``skip``
            it (its rows are part of the next one), or ``wait``.
        max_failures: how many background failures in a row are only logged.
        retention: which checkpoints stay when new ones are committed; the others are deleted in the
            background. None: all stay.
        timeout_seconds: how long a rank waits for the others in a save or restore.
        chunk_bytes: memory for the rows of a chunk, with every copy of them that is made while it
            is saved; a restore takes as much.

    Raises:
        UnsupportedTable: see ``track``.
        ValueError, TypeError: an argument is out of range, or of another kind.
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
        triggers: Sequence[Trigger] = (),
        background: BackgroundKind = "thread",
        staging: StagingMode = "auto",
        memory_budget: int | None = None,
        when_busy: Literal["skip", "wait"] = "skip",
        max_failures: int = 0,
        retention: Retention | None = DEFAULT_RETENTION,
        callbacks: Sequence[Callback] = (),
        timeout_seconds: float = 1800.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        declared = dict(state or {})
        check_arguments(
            declared,
            policy=policy,
            triggers=triggers,
            background=background,
            staging=staging,
            when_busy=when_busy,
            max_failures=max_failures,
            retention=retention,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
        )
        steps = [] if every_steps is None else [EverySteps(every_steps)]
        self.root = Folder(root)
        self.steps = 0
        """Optimizer steps done, counted by ``step`` and restored with a checkpoint."""
        states = {n: s.state if isinstance(s, PerRank) else s for n, s in declared.items()}
        timeout = timedelta(seconds=timeout_seconds)
        self._ranks = Ranks(timeout)
        # A group of its own: it is used at the same time.
        self._background_ranks = background_ranks = Ranks(timeout)
        tracked: list[TrackedModel] = []  # a table may be unsupported where it is: on one rank
        self._ranks.everywhere(lambda: tracked.append(track(model, states.values())))
        self._target = Target(
            model=model,
            tracked=tracked[0],
            states=states,
            per_rank={n: s.merge for n, s in declared.items() if isinstance(s, PerRank)},
        )
        quantization = quantization or Quantization()
        made: list[Background] = []

        def make_background() -> None:
            made.append(
                Background(
                    self.root,
                    background_ranks,
                    kind=background,
                    mode=staging,
                    memory_budget=memory_budget,
                    chunk_bytes=chunk_bytes,
                    quantization=quantization.resolved(lossy_restores=0),
                    expected=[shard.local for shard in tracked[0].shards],
                    dense_bytes=_dense_bytes(model, tracked[0]),
                )
            )

        try:
            self._ranks.everywhere(make_background)
        except BaseException:
            tracked[0].close()
            raise
        self._saver = Saver(
            self.root,
            model,
            self._target,
            self._ranks,
            made[0],
            policy=policy or Intermittent(),
            quantization=quantization,
            retention=retention,
            max_failures=max_failures,
            callbacks=callbacks,
        )
        self._when_busy = when_busy
        self._schedule = Schedule([*steps, *triggers], self._ranks)
        self._partly_restored: str | None = None
        self._closed = False

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
            ClaimDamaged: which of the checkpoints count can't be told; the model is unchanged.
            IncompatibleCheckpoint: it doesn't fit the model; the model is unchanged.
            StorageUnreachable: the storage didn't answer for a minute; the model is unchanged.
            ModelPartlyRestored: reading failed after the model was changed, and nothing else could
                be restored; ``step`` and ``save`` refuse to run from then on.
        """
        self._refuse_if_closed()
        started = time.perf_counter()
        if verify not in ("read", "all"):
            raise ValueError(f"verify must be 'read' or 'all', not {verify!r}")
        target = replace(self._target, fit=Fit(map or {}, strict, shrink))
        before = self._saver.quantization
        self._forget_failure()
        self._saver.before_restore()
        try:
            found = restore(self.root, target, self._ranks, checkpoint, verify == "all")
            if found is not None:
                self.steps = found.chain.head.step
                self._saver.restored(found.chain, found.converted, found.forks)
                # What ``found`` says is of the shards as they are.
                self._target.tracked.converted = False
        except BaseException as error:
            if isinstance(error, ModelPartlyRestored) or not isinstance(
                error, (CheckNRunError, OSError)
            ):
                self._partly_restored = str(error)
            raise
        self._partly_restored = None
        self._saver.deferred = False
        if found is None:
            self._saver.log("no checkpoint in %s: a fresh start", self.root)
            return None
        head = found.chain.head
        if self._saver.quantization != before:
            self._saver.log(
                "restored %d times from quantized rows, oftener than expected_restores=%g: rows "
                "are stored with 8 bit from now on, beginning with a full checkpoint",
                self._saver.lineage.lossy_restores,
                self._saver.quantization.expected_restores,
                level=logging.WARNING,
            )
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
            self._saver.log("skipped: %s", what, level=logging.WARNING)
        for problem in found.passed_over:
            self._saver.log("passed over: %s", problem, level=logging.WARNING)
        self._saver.log("restored %s (step %d) in %.2f s", head.id, head.step, report.seconds)
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
            RootInUse: another run writes checkpoints to this root.
        """
        self._refuse_if_closed()
        self._refuse_if_partly_restored()
        self._saver.claim_early()
        self.steps += 1
        self._saver.settle(wait=False)
        due = self._schedule.due(self.steps) or self._saver.deferred
        ending = self._schedule.ending
        if ending:
            self._forget_failure()
        if due:
            self._saver.settle(wait=self._when_busy == "wait")
            self._begin()
        if ending and not self._saver.deferred:
            try:
                self.wait()
            finally:
                self._schedule.end()
        return self._saver.outcome()

    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Begins a checkpoint now, after the one that is being written.

        Args:
            wait: until it is durable; if not, it becomes so while training goes on.

        Returns:
            What was saved, if ``wait``. None if gradients wait for their optimizer on any rank:
            then ``step`` will save as soon as none does. None also if the last checkpoint is of
            this step, can be restored, and no row was modified since; or if it failed, and so many
            failures are allowed (``max_failures``).

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan, ModelPartlyRestored, RootInUse: as ``step``.
        """
        self._refuse_if_closed()
        self._refuse_if_partly_restored()
        self._saver.settle(wait=True)
        begun = self._begin()
        if begun and wait:
            self._saver.outcome()  # of the one before: its error, or nothing that is new
            return self.wait()
        self._saver.raise_failure()
        return None

    def mark(self, table: str, rows: RowIds) -> None:
        """Marks rows that were written by hand (global ids); call it on all ranks.

        Raises:
            KeyError, IndexError: no such table, or no such row of it.
        """
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
        self._saver.settle(wait=True)
        return self._saver.outcome()

    def close(self) -> None:
        """Saves if that is due at the end (``AtEnd``), waits, takes the hooks off the model and
        gives the staging memory back. Closing again does nothing.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: a checkpoint was not committed.
            SystemExit: SIGTERM has come meanwhile (``OnSigterm``).
        """
        if self._closed:
            return
        try:
            self._saver.settle(wait=True)
            wanted = self._schedule.at_end and self._partly_restored is None
            if wanted and self._ranks.from_rank_0(self._is_behind):
                self._forget_failure()  # its rows are part of this one
                self._begin()
                if self._saver.deferred:
                    raise SaveFailed(
                        f"the last checkpoint, of step {self.steps}, was not made: gradients wait "
                        "for their optimizer. Call its step(), or zero_grad() to drop them, before "
                        "close()"
                    )
            self.wait()
        finally:
            idle = self._saver.running is None
            self._release()
            if idle:
                self._ranks.close()
                self._background_ranks.close()

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
            self._release(failed=True)

    def _release(self, failed: bool = False) -> None:
        self._closed = True
        self._target.tracked.close()
        self._saver.close()
        self._schedule.close(failed)

    def _begin(self) -> bool:
        begun = self._saver.begin(self.steps)
        if begun:
            self._schedule.saved()
        return begun

    def _is_behind(self) -> bool:
        """Whether steps were done since the last checkpoint."""
        last = self._saver.lineage.previous
        return self.steps > 0 and (last is None or last.step != self.steps)

    def _forget_failure(self) -> None:
        """What failed before is not to keep from what comes now."""
        try:
            self.wait()
        except CheckNRunError as error:
            logger.error("a checkpoint was not committed: %s", error)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise CheckNRunError(
                f"this Checkpointer of {self.root} is closed, and its hooks are off the model: "
                "make a new one to go on"
            )

    def _refuse_if_partly_restored(self) -> None:
        if self._partly_restored is not None:
            raise ModelPartlyRestored(
                "a restore failed half-way, and the model is no longer one state: restore again, "
                f"or start from a new model. {self._partly_restored}"
            )


def _dense_bytes(model: nn.Module, tracked: TrackedModel) -> int:
    """About what is no table takes: parameters with an optimizer's two states each, and buffers."""
    tables = {shard.local.weight.data_ptr() for shard in tracked.shards}
    parameters = sum(3 * p.nbytes for p in model.parameters() if p.data_ptr() not in tables)
    return parameters + sum(buffer.nbytes for buffer in model.buffers())
