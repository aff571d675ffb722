"""The one object a training loop holds: it decides when, and calls the rooms below in order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.chain import highest_sequence
from torchrec_checknrun.dense_state import DenseStates
from torchrec_checknrun.errors import (
    CheckNRunError,
    ModelPartlyRestored,
    SaveFailed,
    UnsupportedState,
)
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.fit import Fit
from torchrec_checknrun.gradients import PendingGradients
from torchrec_checknrun.lineage import Lineage, Proposal
from torchrec_checknrun.load_planner import Merge
from torchrec_checknrun.manifest import Manifest
from torchrec_checknrun.policy import Decision, OneShot, Policy
from torchrec_checknrun.quantization import Quantization
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.report import CheckpointReport, RestoreReport, checkpoint_report
from torchrec_checknrun.restore import MODEL, Target, own_error, restore
from torchrec_checknrun.save_planner import CHUNK_BYTES, SavePlanner
from torchrec_checknrun.sharded_state import StoredTables, drop_tables, find_blocks
from torchrec_checknrun.snapshot import Snapshot, take_rows
from torchrec_checknrun.storage import StorageWriter
from torchrec_checknrun.tracked import RowIds, TrackedModel, track
from torchrec_checknrun.tracking import Consumer, Cut

logger = logging.getLogger(__name__)

Callback = Callable[[CheckpointReport], None]

_MARKS = {
    Decision.FULL: None,
    Decision.SINCE_BASELINE: Consumer.BASELINE,
    Decision.SINCE_LAST: Consumer.LAST,
}


class PerRank:
    """Declares that a state object differs between ranks: each rank's own is saved.

    Attributes:
        state: the object.
        merge: makes one rank's state dict of the list of all that were saved, in rank order; needed
            only to restore on another number of ranks, which is an error without it.
    """

    # No dataclass: hydra.utils.instantiate would make a config of it.
    def __init__(self, state: Stateful, merge: Merge | None = None) -> None:
        self.state = state
        self.merge = merge


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
        timeout_seconds: how long a rank waits for the others in a save or restore.
        chunk_bytes: memory for the rows on their way to storage; a restore takes as much as the
            save did.

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
        if chunk_bytes < 1 or timeout_seconds <= 0:
            raise ValueError("chunk_bytes and timeout_seconds must be positive")
        self.root = Folder(root)
        self.steps = 0
        """Optimizer steps done, counted by ``step`` and restored with a checkpoint."""
        self._policy = policy or OneShot()
        self._quantization = quantization or Quantization()
        self._every_steps = every_steps
        self._callbacks = tuple(callbacks)
        self._chunk_bytes = chunk_bytes
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
        """To be called after every training step; saves when a checkpoint is due.

        While gradients of dense parameters wait for their optimizer (gradient accumulation), a
        checkpoint that is due is put off until a step at whose end none does.

        Raises:
            ModelPartlyRestored, CheckNRunError: as ``save``.
        """
        self._refuse_if_partly_restored()
        self.steps += 1
        due = self._every_steps is not None and self.steps % self._every_steps == 0
        return self.save() if due or self._deferred else None

    def save(self) -> CheckpointReport | None:
        """Saves now. When it returns, the checkpoint is durable.

        Returns:
            What was saved; None if gradients wait for their optimizer on any rank: then ``step``
            will save as soon as none does.

        Raises:
            SaveFailed: it was not committed, on no rank; its rows stay marked and the next
                checkpoint holds them.
            UnsupportedState, InvalidPlan: the same, because of what was to be saved.
            ModelPartlyRestored: a restore failed half-way before.
        """
        self._refuse_if_partly_restored()
        started = time.perf_counter()
        proposal = self._agree()
        self._deferred = proposal is None
        if proposal is None:
            message = "gradients wait for their optimizer: the checkpoint of step %d is put off"
            self._log(message, self.steps, level=logging.WARNING)
            return None
        cut: list[Cut] = []
        planner = SavePlanner.decided(
            proposal.header,
            lambda: self._take_snapshot(proposal, cut),
            self._resolved_quantization(),
            self._chunk_bytes,
        )
        self._target.tracked.unite(self._ranks.group)
        try:
            metadata = dcp.save(
                {},
                storage_writer=StorageWriter((self.root / proposal.id).url),
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except BaseException as error:
            for taken in cut:
                self._target.tracked.merge(taken)
            if isinstance(error, CheckpointException):
                cause = own_error(error)
                if isinstance(cause, CheckNRunError):
                    raise cause from error
            elif isinstance(error, Exception):
                cause = error
            else:
                raise
            raise SaveFailed(
                f"the checkpoint at step {self.steps} was not committed: {cause!r}. Its rows are "
                "kept for the next one; mend the storage and save again"
            ) from error
        manifest: Manifest = metadata.planner_data
        self._lineage.committed(manifest)
        stall = time.perf_counter() - started
        report = checkpoint_report(manifest, self._lineage.chain_length, stall)
        self._log("%s", report)
        for callback in self._callbacks:
            callback(report)
        return report

    def mark(self, table: str, rows: RowIds) -> None:
        """Marks rows that were written by hand (global ids); call it on all ranks."""
        self._target.tracked.mark(table, rows)

    def mark_all(self, table: str | None = None) -> None:
        """Marks all rows of a table, or of all; call it on all ranks."""
        self._target.tracked.mark_all(table)

    def wait(self) -> None:
        """Returns when every checkpoint begun is durable (``save`` waits for that already)."""

    def close(self) -> None:
        """Waits, and takes the hooks off the model."""
        self.wait()
        self._remove_hooks()

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
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._target.tracked.close()
        self._gradients.close()

    def _agree(self) -> Proposal | None:
        """Rank 0 decides on the next checkpoint; all hear it. None: not now."""
        tracked = self._target.tracked

        def look() -> tuple[int, bool]:
            tracked.refresh()
            return self.steps, self._gradients.waiting or tracked.waiting

        facts = self._ranks.everywhere(look)
        steps = [steps for steps, _ in facts]
        if len(set(steps)) > 1:
            raise SaveFailed(
                f"the ranks are at different steps {steps}: call step() or save() on all ranks at "
                "the same point of the training loop"
            )
        if any(waits for _, waits in facts):
            return None
        if tracked.converted:
            self._lineage.resharded()
            tracked.converted = False
        return self._ranks.from_rank_0(self._decide)

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

    def _take_snapshot(self, proposal: Proposal, cut: list[Cut]) -> Snapshot:
        tracked = self._target.tracked
        states: dict[str, Any] = {MODEL: self._model.state_dict()}
        optimizers = DenseStates(self._model, self._target.states)
        states |= optimizers.stored()
        states |= {n: s.state_dict() for n, s in self._target.states.items() if n not in optimizers}
        stored = StoredTables(tracked.tables, (shard.local for shard in tracked.shards))
        dense = {name: drop_tables(value, stored) for name, value in states.items()}
        blocks = find_blocks(states, stored, optimizers)
        for name, value in dense[MODEL].items():
            if not isinstance(value, torch.Tensor):
                raise UnsupportedState(
                    f"the model's state dict has {name!r}, a {type(value).__name__} (extra state), "
                    "which can't be given back to it: put it into a state object of its own"
                )
        shards, taken = take_rows(tracked, _MARKS[proposal.decision])
        cut.append(taken)
        return Snapshot(
            shards=shards,
            tables=tracked.tables,
            states=dense,
            per_rank=frozenset(self._target.per_rank),
            progress=tracked.progress(),
            blocks=blocks,
            collisions=tracked.collisions.state(),
        )

    def _refuse_if_partly_restored(self) -> None:
        if self._partly_restored is not None:
            raise ModelPartlyRestored(
                "a restore failed half-way, and the model is no longer one state: restore again, "
                f"or start from a new model. {self._partly_restored}"
            )

    def _log(self, message: str, *values: object, level: int = logging.INFO) -> None:
        if self._ranks.rank == 0:
            logger.log(level, message, *values)
