"""Bring a run back: from images in memory, from a checkpoint of its root, or from the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torchrec_checknrun.errors import CheckNRunError, CheckpointNotFound, ModelPartlyRestored
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks, listed
from torchrec_checknrun.recovery.missing_root import protect_existing, start_fresh
from torchrec_checknrun.recovery.restore_report import report_recovered, report_restored
from torchrec_checknrun.recovery.skipped_initialization import (
    initialize_skipped,
    note_initialized,
    why_uninitialized,
)
from torchrec_checknrun.recovery.survival import Recovered, Survival
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.restore import Restored, Target, restore
from torchrec_checknrun.root.report import RestoreReport
from torchrec_checknrun.run.saver import Saver


@dataclass
class Restoring:
    """The restores of a Checkpointer.

    Attributes:
        steps: the steps done as of the last restore; set before one to the steps done until then.
        partly_restored: why only a part of the model was restored; None if all of it is as it was
            before the restore, or of one checkpoint.
    """

    options: Options
    target: Target
    ranks: Ranks
    saver: Saver
    survival: Survival
    steps: int = 0
    partly_restored: str | None = None

    def __post_init__(self) -> None:
        self._uninitialized = why_uninitialized(self.options.model)

    def restore(
        self, checkpoint: str | None, fit: Fit, *, verify_all: bool, required: bool | None
    ) -> RestoreReport | None:
        """Restore model and state objects; a collective. Arguments as ``Checkpointer.restore``."""
        started = time.perf_counter()
        before = self.saver.proposer.quantization
        root, resume = self.options.root, self.options.resume
        if not required and checkpoint is None and resume == "never":
            self._require_whole_tables(self._initialize())
            protect_existing(root, self.ranks, self.saver.writer)
            self.survival.begin(self.steps, at_start=True)
            return None
        if checkpoint is None and (recovered := self._recover()) is not None:
            return report_recovered(self.saver, recovered, time.perf_counter() - started)
        lost = self._initialize()
        self.survival.overwriting()
        found = self._apply(checkpoint, fit, verify_all)
        if found is None:
            self._require_whole_tables(lost)
        self.partly_restored = None
        self.saver.deferred = False
        self.survival.begin(self.steps, at_start=True)
        if found is None:
            self.saver.writer.restored(None)
            start_fresh(
                root, self.ranks, required=resume == "must" if required is None else required
            )
            return None
        seconds, now = time.perf_counter() - started, self.saver.proposer.quantization
        report = report_restored(self.saver, found, before, now, seconds)
        return replace(report, without_images=self.survival.reasons)

    def require_whole(self) -> None:
        """Refuse to go on with a model that was not restored, or of which only a part was.

        Raises:
            ModelPartlyRestored: it is such a model.
        """
        if self._uninitialized is not None:
            raise ModelPartlyRestored(self._uninitialized)
        if self.partly_restored is not None:
            raise ModelPartlyRestored(
                "a restore failed half-way: restore again, or start from a new model. "
                f"{self.partly_restored}"
            )

    def _initialize(self) -> list[str]:
        """Make up for initial values that were left out for the sake of images; a collective.

        Returns:
            The tables that the program has written a part of before, which is lost.
        """
        initialize: Callable[[], list[str]] = list
        if self._uninitialized is not None:
            initialize = partial(initialize_skipped, self.options.model)
        lost = self.ranks.on_all_ranks(initialize)
        self._uninitialized = None
        return sorted(set().union(*lost))

    def _require_whole_tables(self, lost: list[str]) -> None:
        """Refuse a fresh start that has lost what the program wrote to a part of tables.

        Raises:
            ModelPartlyRestored: it has.
        """
        if lost:
            self.partly_restored = (
                f"a part of the rows of {listed(lost)} was written before restore(), in a model "
                "that was built within skip_initialization(), and is lost: write it after "
                "restore() has returned None, or build the model outside of that block"
            )
            raise ModelPartlyRestored(self.partly_restored)

    def _recover(self) -> Recovered | None:
        """Go on from images and note it; None if they can't be used."""
        try:
            recovered = self.survival.recover()
        except ModelPartlyRestored as error:
            self.partly_restored = str(error)
            raise
        except BaseException as error:
            if self.survival.half_way:
                self.partly_restored = f"going back by images was interrupted ({error!r})"
            raise
        if recovered is not None:
            note_initialized(self.options.model)
            self._uninitialized = None
            self.steps, self.partly_restored = recovered.step, None
            self.saver.deferred = False
        return recovered

    def _apply(self, checkpoint: str | None, fit: Fit, verify_all: bool) -> Restored | None:
        """Restore the model and note it, or remember that the model is partly restored."""
        target = replace(self.target, fit=fit)
        try:
            found = restore(self.survival.root, target, self.ranks, checkpoint, verify_all)
            if found is not None:
                self.steps = found.chain.head.step
                self.saver.restored(found)
                found.references = []
                self.saver.writer.keep(found.unread)
                # ``found`` speaks of the shards as they are now.
                self.target.tracked.converted = False
                self.survival.half_way = False
            elif self.survival.half_way:
                raise CheckpointNotFound("no checkpoint is left")
        except BaseException as error:
            known = isinstance(error, (CheckNRunError, OSError))
            if isinstance(error, ModelPartlyRestored) or not known or self.survival.half_way:
                self.partly_restored = str(error)
            if known and self.survival.half_way:
                raise ModelPartlyRestored(
                    f"going back by images failed half-way, and then the restore: {error}"
                ) from error
            raise
        return found
