"""The one object a training loop holds: it decides when, and calls the rooms below in order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, overload

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Never

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.dense.buffers import Patterns
from torchrec_checknrun.errors import CheckNRunError, ModelPartlyRestored, SaveDeferred, SaveFailed
from torchrec_checknrun.model.tracked import RowIds
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.restore import restore
from torchrec_checknrun.root.policy import Policy
from torchrec_checknrun.root.report import CheckpointReport, RestoreReport
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.run.arguments import Arguments, PerRank, Replicated, Resume
from torchrec_checknrun.run.assembly import Assembly
from torchrec_checknrun.run.missing_root import protect_existing, start_anew
from torchrec_checknrun.run.restore_report import report_restored
from torchrec_checknrun.run.saver import Begun, Callback, Saver
from torchrec_checknrun.run.schedule import Schedule
from torchrec_checknrun.run.triggers import EverySteps, Trigger
from torchrec_checknrun.save.background import BackgroundKind
from torchrec_checknrun.save.staging import StagingMode
from torchrec_checknrun.shards import CHUNK_BYTES

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
            same on all ranks (a save compares them, and fails if they differ), or wrapped in
            ``PerRank`` (each rank's own) or ``Replicated`` (rank 0's, for all). Its
            ``load_state_dict`` is handed what its ``state_dict`` gave when it was saved, whatever
            the shape. Content: see ``state.encode_state``.
            (``model.reshard`` makes TorchRec's fused optimizers anew, with step 0 and the first
            learning rate, and you a new CombinedOptimizer. The one given here serves on, but keeps
            the old tables in memory: in a job that reshards, give the dense optimizer alone.)
        per_rank_buffers: names of the model's buffers, or patterns over them, that each rank keeps
            its own of (``"*.running_*"``, or several in a list). Of others all ranks get rank 0's.
            Another number of ranks needs a merge function, ``{"*.running_mean": merge}``: it makes
            one tensor of the list of all that were saved, in rank order.
        policy: which rows a checkpoint holds: an object, or the name of one (``consecutive``).
        quantization: in how many bits; exact by default. A width alone (``8``) will do.
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
        resume: what ``restore()`` does without more said: ``auto`` takes the newest whole chain, or
            starts anew where there is no checkpoint; ``must`` raises there; ``never`` starts anew
            in any case (after a restart by torchrun, too), and keeps the chain that is there.
        timeout_seconds: how long a save, a restore or ``close`` waits for other ranks, or for a
            storage that doesn't answer, without hearing anything.
        chunk_bytes: memory for the rows of a chunk, with every copy of them that is made while it
            is saved; a restore takes as much.

    Raises:
        UnsupportedTable: see ``track``.
        ValueError, TypeError: an argument is out of range, of another kind, or not the same on all
            ranks (memory budget and callbacks may differ); the same error on all ranks.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: nn.Module,
        state: Mapping[str, Stateful | PerRank | Replicated] | None = None,
        per_rank_buffers: Patterns = (),
        policy: Policy | str | None = None,
        quantization: Quantization | int | Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        triggers: Sequence[Trigger] = (),
        background: BackgroundKind = "thread",
        staging: StagingMode = "auto",
        memory_budget: int | None = None,
        when_busy: Literal["skip", "wait"] = "skip",
        max_failures: int = 0,
        retention: Retention | None = DEFAULT_RETENTION,
        callbacks: Sequence[Callback] = (),
        resume: Resume = "auto",
        timeout_seconds: float = 1800.0,
        chunk_bytes: int = CHUNK_BYTES,
        **unknown: Never,
    ) -> None:
        check = partial(
            Arguments.checked,
            root,
            model=model,
            state=state,
            per_rank_buffers=per_rank_buffers,
            policy=policy,
            quantization=quantization,
            every_steps=every_steps,
            triggers=triggers,
            background=background,
            staging=staging,
            when_busy=when_busy,
            max_failures=max_failures,
            retention=retention,
            callbacks=callbacks,
            resume=resume,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
            unknown=unknown,
        )
        parts = Assembly.of(
            model, check, timeout_seconds=timeout_seconds, memory_budget=memory_budget
        )
        arguments = parts.arguments
        self.root = arguments.root
        self.steps = 0
        """Optimizer steps done, counted by ``step`` and restored with a checkpoint."""
        self._ranks, self._background_ranks = parts.ranks, parts.background_ranks
        self._target = parts.target
        self._resume = arguments.resume
        saver = partial(
            Saver,
            self.root,
            model,
            self._target,
            self._ranks,
            parts.background,
            policy=arguments.policy,
            quantization=arguments.quantization,
            retention=retention,
            max_failures=max_failures,
            callbacks=callbacks,
        )
        self._saver = parts.on_all_ranks(saver, Saver.close)
        self._when_busy = when_busy
        steps = [] if arguments.every_steps is None else [EverySteps(arguments.every_steps)]
        schedule = partial(Schedule, [*steps, *arguments.triggers], self._ranks)
        self._schedule = parts.on_all_ranks(schedule, lambda made: made.close(failed=True))
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
        required: bool | None = None,
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
            required: whether a root without a checkpoint is an error; None: as ``resume`` says.

        Returns:
            What was restored; None if the root holds no checkpoint (a fresh start, which a warning
            tells, with the place that was searched), or if ``resume`` is ``never``.

        Raises:
            CheckpointNotFound: there is no checkpoint of that id, or none at all though one is
                required.
            RootNotShared: the ranks see different storage under the root's name.
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
        if required is None and checkpoint is None and self._resume == "never":
            protect_existing(self.root, self._ranks, self._saver.writer)
            return None
        try:
            found = restore(self.root, target, self._ranks, checkpoint, verify == "all")
            if found is not None:
                self.steps = found.chain.head.step
                self._saver.restored(
                    found.chain, found.converted, found.forks, partly=bool(found.skipped)
                )
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
            must = self._resume == "must" if required is None else required
            start_anew(self.root, self._ranks, required=must)
            return None
        return report_restored(self._saver, found, before, time.perf_counter() - started)

    def step(self) -> CheckpointReport | None:
        """To be called after every training step; begins a checkpoint when one is due.

        While gradients of dense parameters wait for their optimizer (gradient accumulation), a
        checkpoint that is due is put off until a step at whose end none does.

        Returns:
            The report of the last checkpoint that has become durable, unless it was returned
            already; None if there is no such: none was due, it is still on its way, was put off,
            or failed and so many failures are allowed (``max_failures``; they are logged).

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: the last checkpoint was not committed, on no
                rank; its rows stay marked and the next one holds them.
            ModelPartlyRestored: a restore failed half-way before.
            RootInUse, RootNotShared, ClaimDamaged: this run may not write to the root.
        """
        self._require_usable()
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

    @overload
    def save(self, *, wait: Literal[True] = True) -> CheckpointReport: ...

    @overload
    def save(self, *, wait: bool) -> CheckpointReport | None: ...

    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Save a checkpoint now, after the one that is being written.

        Args:
            wait: until it is durable; if not, it becomes so while training goes on.

        Returns:
            If ``wait``, the report of the checkpoint that holds the present state: always. If the
            last one is of this step and nothing at all has changed since (rows, parameters,
            buffers, optimizers, state objects), nothing is written and its report is returned, with
            ``unchanged``. Unless ``wait``, None: always; ``step`` or ``wait`` return the report.

        Raises:
            SaveDeferred: gradients wait for their optimizer on any rank, and ``wait``; ``step``
                will save as soon as none does, as it also will without ``wait``.
            SaveFailed, UnsupportedState, InvalidPlan: it was not committed, on no rank, whatever
                ``max_failures`` allows ``step``; its rows stay marked. Or the one before was not.
            ModelPartlyRestored, RootInUse, RootNotShared, ClaimDamaged: as ``step``.
        """
        self._require_usable()
        self._saver.settle(wait=True)
        begun = self._begin(tell=wait)
        if not wait:
            self._saver.raise_failure()
            return None
        self._saver.outcome()  # of the one before: its error, or nothing that is new
        if begun is Begun.FAILED:
            raise SaveFailed(
                f"step {self.steps} was not saved: on another rank the checkpoint before was not "
                "committed. Its rows are kept for the next one; save again"
            )
        if begun is Begun.DEFERRED:
            raise SaveDeferred(
                f"step {self.steps} was not saved: gradients wait for their optimizer, and a "
                "checkpoint would lose them. Call the optimizer's step(), or zero_grad() to drop "
                "them, and save again; step() saves by itself as soon as none waits"
            )
        if begun is Begun.UNCHANGED:
            return self._saver.unchanged()
        report = self.wait()
        assert report is not None
        return report

    def mark(self, table: str, rows: RowIds) -> None:
        """Mark rows (global ids) that were written in a way that PyTorch doesn't notice: through
        ``.data``, NumPy, a collective on the table or a kernel of your own. Call it on all ranks.

        Other writes by hand (``copy_``, ``weight[rows] = …``, ``load_state_dict``, also of
        optimizers) are noticed, and mark all rows of the tables concerned, whether ``mark`` names
        some or not: do them inside ``writing`` where only those rows are to be saved.

        Raises:
            KeyError, IndexError: no such table, or no such row of it.
        """
        self._target.tracked.mark(table, rows)

    def writing(self, table: str, rows: RowIds) -> AbstractContextManager[None]:
        """Announce that the ``with`` block writes these rows (global ids) by hand: they are marked,
        and no others. Enter it on all ranks; each writes those that it holds.

        Raises:
            KeyError, IndexError: no such table, or no such row of it.
        """
        return self._target.tracked.writing(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Mark all rows of a table, or of all tables; call it on all ranks, as ``mark``."""
        self._target.tracked.mark_all(table)

    def wait(self) -> CheckpointReport | None:
        """Wait until the checkpoint that was begun is durable.

        Returns:
            The report of the last checkpoint that has become durable, unless ``step``, ``save`` or
            ``wait`` has returned it already. None if there is no such: nothing was begun since, or
            it failed and so many failures are allowed (``max_failures``; they are logged).

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
            if wanted and self._saver.has_unsaved_steps(self.steps):
                self._forget_failure()  # its rows are part of this one
                if self._begin() is Begun.DEFERRED:
                    raise SaveFailed(
                        f"the last checkpoint, of step {self.steps}, was not made: gradients wait "
                        "for their optimizer. Call its step() or zero_grad() before close()"
                    )
            self.wait()
        finally:
            idle = self._saver.running is None and not self._saver.hangs
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
        self._saver.close(failed)
        self._schedule.close(failed)

    def _begin(self, tell: bool = False) -> Begun:
        begun = self._saver.begin(self.steps, tell)
        if begun is Begun.YES:
            self._schedule.saved()
        return begun

    def _forget_failure(self) -> None:
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

    def _require_usable(self) -> None:
        self._refuse_if_closed()
        if self._partly_restored is not None:
            raise ModelPartlyRestored(
                "a restore failed half-way: restore again, or start from a new model. "
                f"{self._partly_restored}"
            )
