"""Provide the one object a training loop holds: decide when, and call the rooms below in order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Never

from torchrec_checknrun.callers import OneCaller, one_at_a_time
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.memory.images import HostCopies, Images
from torchrec_checknrun.memory.partial import PartialRecovery
from torchrec_checknrun.options.arguments import PerRank, Replicated
from torchrec_checknrun.options.compact_after import CompactAfter
from torchrec_checknrun.options.options import Callback, Resume, WhenBusy
from torchrec_checknrun.options.publish import Publish
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.root.policy import Policy
from torchrec_checknrun.root.report import CheckpointReport, RestoreReport
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.run.assembly import Assembly
from torchrec_checknrun.run.by_hand import WrittenByHand
from torchrec_checknrun.run.facts import Begun, not_begun, not_begun_at_the_end
from torchrec_checknrun.run.restoring import Restoring
from torchrec_checknrun.run.waiting import warn_of_end
from torchrec_checknrun.save.background import BackgroundKind
from torchrec_checknrun.save.parent_content import DenseForm
from torchrec_checknrun.schedule.triggers import Trigger
from torchrec_checknrun.shards import CHUNK_BYTES
from torchrec_checknrun.snapshot.encoded_at_cut import StagingMode
from torchrec_checknrun.values.buffers import Patterns

logger = logging.getLogger(__name__)

DEFAULT_RETENTION = Retention()


class Checkpointer(WrittenByHand):
    """The checkpoints of one TorchRec model: saves the model and its run's state, restores both.

    Construct it on all ranks at once, after the model is sharded. Call ``restore``, ``step``,
    ``save`` and ``close`` on all ranks at the same point of the training loop, in the thread that
    trains: a call by another one, or in the midst of another call, is refused.

    Args:
        root: folder or fsspec URL of this run's checkpoints.
        model: DistributedModelParallel (or any module with sharded embedding collections). Its
            sharded tables and their fused optimizer state are saved by rows, the rest in full.
        state: everything else of the run, by name: optimizer, reader, progress … Each object is the
            same on all ranks (a save compares them, and fails if they differ), or wrapped in
            ``PerRank`` (each rank's own) or ``Replicated`` (rank 0's, for all). Its
            ``load_state_dict`` receives what its ``state_dict`` returned at the save, in any shape.
            (``model.reshard`` replaces TorchRec's fused optimizers, step and learning rate
            included; the CombinedOptimizer given here keeps working, but keeps the old tables in
            memory: in a job that reshards, give the dense optimizer alone.)
        per_rank_buffers: patterns over names of buffers of which each rank keeps its own
            (``"*.running_*"``, or several in a list); of other buffers all ranks get rank 0's. A
            restore on another number of ranks needs a merge function, ``{"*.running_mean":
            merge}``, from the list of all saved tensors, in rank order, to one tensor.
        policy: which rows a checkpoint holds: an object, or the name of one (``consecutive``);
            None: ``Intermittent()``, with ``delta`` and ``lc`` ``Consecutive()``.
        quantization: bits of stored values; exact by default. A width alone (``8``) will do.
        every_steps: ``step`` saves at every so many steps: the trigger ``EverySteps``.
        triggers: further triggers of saves in ``step`` or ``close``: ``EverySeconds``, ``AtEnd``,
            ``OnSigterm``, or your own.
        callbacks: called with each committed report, at one step on all ranks; errors are logged.
        background: whether a ``thread`` or a ``process`` encodes and writes during training.
        staging: what training waits for. ``copy_on_write``: for copies of rows that it is about to
            overwrite; where a table doesn't allow that, as ``auto``. ``copy``: for copies of all
            rows; ``encode``: for rows encoded, in less memory; ``auto``: whichever is faster.
        memory_budget: bytes of this rank on their way to storage; None: a quarter of the free
            memory, shared by the machine's ranks. What doesn't fit is staged in parts while
            training waits. A state object is one piece; a larger one exceeds it, with a warning.
        when_busy: what ``step`` does when a checkpoint is due while one is being written: ``skip``
            it (its rows are part of the next one), or ``wait``.
        max_failures: how many background failures in a row are only logged, but by ``close``.
        retention: checkpoints to keep after a commit, others are deleted in background; None: all.
        resume: the default of ``restore()``: ``auto`` takes the newest complete chain, or starts
            fresh where there is no checkpoint; ``must`` raises there; ``never`` starts fresh unless
            one is named or required (after a restart by torchrun, too), and keeps the chain there.
        timeout_seconds: how long a save, a restore or ``close`` waits without any answer from other
            ranks or the storage.
        chunk_bytes: bytes of memory for the rows of a chunk, with every copy of them that a save
            makes; a restore takes as much.
        survive: ``Images()`` keeps each rank's state in shared memory: processes that die and start
            again lose no step. ``HostCopies()`` keeps the newest checkpoint there. None: neither.
        partial: ``PartialRecovery(…)`` sends only ranks whose images are gone back to the newest
            checkpoint, within a budget of lost samples; None: all ranks go back.
        compact_after: when a niced process compacts the chain behind training, for the next
            checkpoint to build on the copy: ``CompactAfter(…)``, a number of links (``8``), or a
            share of the full checkpoint's bytes (``0.5``); None: never.
        dense: whether everything beside the tables is written ``whole``, or as a lossless
            ``difference`` to the parent wherever that is smaller; for that each rank keeps what it
            wrote last, up to 1 GiB.
        publish: ``Publish(root=…)`` publishes what a prediction depends on between checkpoints, for
            a ``Follower``; None: nothing is. What can't be followed is refused here.

    Raises:
        UnsupportedTable, UnsupportedState: see ``track`` and ``publish``.
        ImagesRefused: ``survive`` is not possible with this model or on this machine; ``restore``
            and the first ``step`` raise it as well, of too much state.
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
        staging: StagingMode = "copy_on_write",
        memory_budget: int | None = None,
        when_busy: WhenBusy = "skip",
        max_failures: int = 0,
        retention: Retention | None = DEFAULT_RETENTION,
        callbacks: Sequence[Callback] = (),
        resume: Resume = "auto",
        timeout_seconds: float = 1800.0,
        chunk_bytes: int = CHUNK_BYTES,
        survive: Images | HostCopies | None = None,
        partial: PartialRecovery | None = None,
        compact_after: CompactAfter | int | float | None = None,
        dense: DenseForm = "difference",
        publish: Publish | None = None,
        **unknown: Never,
    ) -> None:
        # First of all, before there are other local variables: every argument by its name.
        given = {k: v for k, v in locals().items() if k not in ("self", "unknown")}
        parts = Assembly.of(given, unknown)
        self.root = parts.options.root
        self.steps = 0
        """Optimizer steps done, counted by ``step`` and restored with a checkpoint."""
        self._options, self._target = parts.options, parts.target
        self._ranks, self._background_ranks = parts.ranks, parts.background_ranks
        self._saver, self._survival = parts.saver, parts.survival
        self._schedule, self._publisher = parts.schedule, parts.publisher
        self._restoring = Restoring(
            self._options, self._target, self._ranks, self._saver, self._survival
        )
        self._caller = OneCaller(f"this Checkpointer of {self.root}")

    @one_at_a_time("trains")
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
        """Restore model and state objects from a checkpoint.

        Args:
            checkpoint: its id; None for the newest complete chain, which skips damaged checkpoints
                and reports why.
            verify: ``read`` verifies each chunk as it is read; ``all`` reads everything twice and
                finds damaged data before anything is changed.
            map: saved table name to the model's, for renamed tables.
            strict: whether checkpoint and model must have the same tables, optimizers and state
                keys; if not, the report lists what was skipped. A state not given: a warning.
            shrink: whether tables may have fewer rows than were saved. (More are always allowed:
                new rows keep their initialisation.) After a restore that renames, skips or resizes,
                or joins or splits columns, the next checkpoint is full.
            required: whether a root without a checkpoint is an error; None: as ``resume`` says.

        Returns:
            The report of the restore; None for a fresh start: the root holds no checkpoint (a
            warning names the place that was searched), or ``resume`` is ``never``.

        Raises:
            CheckpointNotFound: there is no checkpoint of that id, or none at all though one is
                required.
            RootNotShared: the ranks see different storage under the root's name.
            RootInUse: nothing was found, and another process has committed a checkpoint since.
            CorruptCheckpoint, ChainBroken, UnsupportedFormat: neither the checkpoint nor, unless
                one was named, any older one can be read, or gone on from; the model is unchanged.
            ClaimDamaged: which of the checkpoints count can't be told; the model is unchanged.
            IncompatibleCheckpoint: the checkpoint doesn't fit the model, which is unchanged.
            StorageUnreachable: the storage didn't answer for a minute; the model is unchanged.
            ModelPartlyRestored: reading failed after the model was changed, and nothing else could
                be restored; from then on ``step`` and ``save`` raise this error, too.
        """
        if verify not in ("read", "all"):
            raise ValueError(f"verify must be 'read' or 'all', not {verify!r}")
        fit = Fit(map or {}, strict, shrink)
        self._forget_failure()
        self._saver.before_restore()
        if self._publisher is not None:
            self._publisher.before_restore()
        self._restoring.steps = self.steps
        try:
            return self._restoring.restore(
                checkpoint, fit, verify_all=verify == "all", required=required
            )
        finally:
            self.steps = self._restoring.steps

    @one_at_a_time("trains")
    def step(self) -> CheckpointReport | None:
        """Count a training step and begin a checkpoint if one is due; call it after every step.

        While gradients of dense parameters wait for their optimizer (gradient accumulation), a due
        checkpoint is put off until the end of a step that leaves no gradient waiting.

        Returns:
            After the same step on all ranks, the report of the last checkpoint that has become
            durable, unless it was returned already. None without one: no checkpoint was due, or the
            last one is on its way, was put off, or failed within ``max_failures``.

        Raises:
            SaveFailed, UnsupportedState, UnsupportedTable, InvalidPlan: the last checkpoint was not
                committed, on no rank; its rows stay marked and are part of the next one.
            ModelPartlyRestored: an earlier restore failed half-way.
            RootInUse, RootNotShared, ClaimDamaged: this run may not write to the root.
            StoreUnreachable, SystemExit: ranks can't agree when to save; SIGTERM has come.
        """
        self._restoring.require_whole()
        self._saver.progressed()
        self.steps += 1
        self._survival.end_step(self.steps)  # first: no checkpoint is newer than the images
        self._settle(wait=False)
        due = self._schedule.due(self.steps) or self._saver.deferred
        ending = self._schedule.ending
        if ending:
            self._forget_failure()
        if due:
            self._settle(wait=ending or self._options.when_busy == "wait")
            self._begin()
        if self._publisher is not None and not ending:
            self._publisher.step(self.steps)
        if ending and not self._saver.deferred:
            try:
                self._wait()
            finally:
                self._schedule.end()
        return self._saver.outcomes.take()

    @overload
    def save(self, *, wait: Literal[True] = True) -> CheckpointReport: ...

    @overload
    def save(self, *, wait: bool) -> CheckpointReport | None: ...

    @one_at_a_time("saves")
    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Save a checkpoint now, after the one that is being written.

        Args:
            wait: whether to wait until the checkpoint is durable; if not, training may go on
                meanwhile.

        Returns:
            With ``wait``, always the report of the checkpoint that holds the present state: of the
            last one, with ``unchanged``, if it is of this step and nothing at all has changed
            since. Without ``wait``, always None; ``step`` or ``wait`` return the report.

        Raises:
            SaveDeferred: with ``wait``, on any rank gradients wait for their optimizer. With or
                without ``wait``, ``step`` saves as soon as none waits.
            SaveFailed, UnsupportedState, UnsupportedTable, InvalidPlan: this checkpoint was not
                committed, on no rank, whatever ``max_failures`` allows where ``wait`` is given; or
                the one before, beyond ``max_failures``. The rows stay marked.
            ModelPartlyRestored, RootInUse, RootNotShared, ClaimDamaged: as ``step``.
        """
        self._restoring.require_whole()
        self._settle(wait=True)
        self._survival.before_save()
        begun = self._begin(tell=wait)
        if not wait:
            self._saver.outcomes.raise_failure()
            return None
        self._saver.outcomes.take()  # of the previous checkpoint: raises its error
        if error := not_begun(begun, self.steps):
            raise error
        if begun is Begun.UNCHANGED:
            return self._saver.unchanged()
        report = self._wait()
        assert report is not None
        return report

    @one_at_a_time("saves")
    def publish(self, *, wait: bool = True) -> CheckpointReport | None:
        """Publish now, after what is being written; with ``wait``, wait until it is durable.

        Returns:
            With ``wait``, the report of the publication; None without, and where it failed or was
            put off, which is logged: publishing never stops training.

        Raises:
            ValueError: the Checkpointer was made without ``publish``. Others: as ``step``.
        """
        self._restoring.require_whole()
        if self._publisher is None:
            raise ValueError("nothing is published: give Checkpointer(..., publish=Publish(root))")
        self._settle(wait=True)
        if self._saver.deferred:  # a checkpoint that was put off goes first
            self._survival.before_save()
            self._begin()
            self._settle(wait=True)
        return self._publisher.publish(self.steps, wait)

    @property
    def published(self) -> CheckpointReport | None:
        """Return the report of the last publication that was committed; None before the first."""
        return None if self._publisher is None else self._publisher.last

    @one_at_a_time("waits")
    def wait(self) -> CheckpointReport | None:
        """Wait until the checkpoint that was begun is durable; return its report as ``step`` does.

        Raises:
            SaveFailed, UnsupportedState, UnsupportedTable, InvalidPlan: it was not committed.
        """
        return self._wait()

    @one_at_a_time("ends")
    def close(self) -> None:
        """Save if ``AtEnd`` asks, wait, remove the hooks, free the staging memory; at most once.

        So it does where one was put off for a publication, or failed for rows written by hand.

        Raises:
            SaveFailed and others of ``step``: the last checkpoint was not committed.
            SystemExit: SIGTERM has come meanwhile (``OnSigterm``).
        """
        if self._caller.closed:
            return
        try:
            self._settle(wait=True)
            wanted = self._schedule.at_end or self._saver.has_left_one
            wanted = wanted and self._restoring.partly_restored is None
            if wanted and self._saver.proposer.has_unsaved_steps(self.steps):
                self._forget_failure()  # its rows are part of the checkpoint begun here
                self._survival.before_save()
                if self._begin() is Begun.DEFERRED:
                    raise not_begun_at_the_end(self.steps)
            self._wait(end=True)
        finally:
            idle = not (self._saver.running or self._saver.publishing() or self._saver.hangs)
            self._release(failed=sys.exc_info()[0] is not None)
            if idle:
                self._ranks.close()
                self._background_ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._caller.closed:  # the other ranks may never arrive: wait for none
            if isinstance(error, StopIteration):
                warn_of_end(self._saver.running)
            self._release(failed=True)

    def _release(self, failed: bool = False) -> None:
        self._caller.close()
        self._survival.close(over=not failed)
        self._target.tracked.close()
        for part in (self._publisher, self._saver, self._schedule):
            if part is not None:
                part.close(failed)

    def _settle(self, wait: bool) -> None:
        """Note the outcome of what is being written, a publication or a checkpoint."""
        if self._publisher is not None:
            self._publisher.settle(wait)
        self._saver.settle(wait)

    def _wait(self, end: bool = False) -> CheckpointReport | None:
        self._settle(wait=True)
        return self._saver.outcomes.take(last=True, end=end)

    def _begin(self, tell: bool = False) -> Begun:
        begun = self._saver.begin(self.steps, tell)
        if begun is Begun.YES:
            self._schedule.saved()
        return begun

    def _forget_failure(self) -> None:
        try:
            self._wait(end=True)
        except CheckNRunError as error:
            logger.error("a checkpoint was not committed: %s", error)
