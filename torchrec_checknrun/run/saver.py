"""Save one checkpoint after the other: agree on it with all ranks, begin it, note its outcome.

All of this runs in the training thread; ``Background`` does the rest.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.dense.gradients import PendingGradients
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.model.hand_written import RowsOverwritten
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Restored, Target
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.root.report import CheckpointReport, Progress
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.facts import Begun, Facts, PutOff, require_one_step
from torchrec_checknrun.run.going_on import GoingOn
from torchrec_checknrun.run.outcomes import Outcomes
from torchrec_checknrun.run.proposer import Proposer
from torchrec_checknrun.run.replicas import united_later
from torchrec_checknrun.run.root_claim import RootClaim
from torchrec_checknrun.run.waiting import await_save, finish_at_exit, still_hanging
from torchrec_checknrun.save.background import Background
from torchrec_checknrun.save.links import HeldReferences
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.snapshot.snapshot import Declared, Snapshot, take_snapshot
from torchrec_checknrun.threads import gc_paused

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MARKS = {Decision.SINCE_BASELINE: Consumer.BASELINE, Decision.SINCE_LAST: Consumer.LAST}
"""The marks of the rows that a differential checkpoint holds."""


class Saver:
    """The training thread's side of saving a model's checkpoints in a lineage.

    Args:
        options: the Checkpointer's arguments.
        target: the model and its states.
        image: hears of each checkpoint that is cut or committed; None without images.

    Attributes:
        lineage: the checkpoints that were committed or restored last.
        writer: the root's writer, in use on rank 0 only.
        going_on: compactions behind training.
        proposer: this rank's look at the model and at what of it is saved.
        outcomes: failures and reports that the training loop has not heard of.
        deferred: whether a checkpoint was due while gradients waited for their optimizer.
        behind: whether it was due while a publication was on its way, and is deferred, too.
        publishing: tells whether a publication is on its way here.
    """

    def __init__(
        self,
        options: Options,
        target: Target,
        ranks: Ranks,
        background: Background,
        image: RankImage | None = None,
    ) -> None:
        self.lineage = Lineage()
        self._image = image
        self._links = HeldReferences()
        self.deferred = self.behind = False
        self.publishing: Callable[[], bool] = lambda: False
        self._root = options.root
        self._model = options.model
        self._target = target
        self._ranks = ranks
        self._background = background
        self.outcomes = Outcomes(options.max_failures, options.callbacks)
        self._declared = Declared(
            target.states, frozenset(target.per_rank), target.replicated, target.buffers
        ).watching(self._model)
        self._gradients = PendingGradients(target.states.values(), self._model)
        self.writer = RootWriter(self._root, self.lineage, options.retention)
        self._claim = RootClaim(self._root, ranks, self.writer)
        self.going_on = GoingOn(
            options.compact_after,
            self._root,
            target.tracked,
            self.lineage,
            self.writer,
            self._links,
            leads=ranks.rank == 0,
        )
        self.proposer = Proposer(
            options,
            target,
            self._declared,
            ranks,
            self.lineage,
            self.writer,
            self._links,
            self.going_on,
            background.memory.chunk_bytes,
        )
        self._running: Save | None = None
        self._finish_at_exit: Callable[[], None] = lambda: None
        self._skipped, self._put_off = False, PutOff()
        self._waited = 0.0
        """Seconds waited for the checkpoint before the one that may be begun now."""
        self._must_tell = False
        """True if somebody waits for the running checkpoint and must hear of its failure."""
        self._last: CheckpointReport | None = None

    @property
    def hangs(self) -> bool:
        """Return whether a checkpoint that was given up still uses its snapshot."""
        return self._background.hangs

    @property
    def running(self) -> Save | None:
        """Return the checkpoint that was begun and whose outcome was not noted yet."""
        return self._running

    @property
    def claimed(self) -> bool:
        """Return whether the root was claimed, on all ranks alike."""
        return self._claim.is_taken

    def progressed(self) -> None:
        """Note a training step; claim the root at the first one.

        Raises:
            RootInUse: another run writes to the root.
        """
        self.writer.progressed()
        self._claim.take_early()
        if self._declared.left_out is not None:
            self._declared.left_out.begin()

    def before_restore(self) -> None:
        """Wait for a running pruning, which doesn't know what is going to be restored; end a
        running compaction, which the restored state may not descend from.
        """
        self.going_on.give_up()
        self.writer.wait_for_pruning()
        self._links.forget()  # two sets of them would take too much memory

    def restored(self, found: Restored) -> None:
        """Note that the model is in a checkpoint's state; see ``Lineage.restored``."""
        self.lineage.restored(found.chain, found.converted, found.forks)
        self.proposer.resolve()
        manifests, tracked = found.chain.manifests, self._target.tracked
        self._links.restored(manifests, found.references, tracked, self.proposer.quantization)
        self._ranks.on_all_ranks(lambda: self.writer.restored(found.chain, found.known))
        self._last = self.lineage.report(Progress())
        self.proposer.fingerprint = None
        if not found.skipped:  # else the model holds more than the checkpoint
            with suppress(Exception):  # the next save reports it
                self.proposer.fingerprint = self.proposer.look_after_restore()

    def recovered(
        self,
        chain: Chain | None,
        lineage: str,
        lossy: int,
        full: bool,
        losses: tuple[Loss, ...] = (),
        passed_over: Sequence[str] = (),
    ) -> None:
        """Note that the model is in a later state than a chain's head, from which it descends.

        Args:
            lineage: the name of the lineage.
            lossy: restores from lossy checkpoints so far, this one being none.
            full: whether the next checkpoint must be full.
            losses: what partial recoveries have cost so far.
            passed_over: as of ``RootWriter.restored``.
        """
        self._ranks.on_all_ranks(lambda: self.writer.restored(chain, passed_over))
        if chain is not None:
            self.lineage.restored(chain, full, forks=False)
            self._last = self.lineage.report(Progress())
        self._links.forget()  # images hold none
        self.lineage.id, self.lineage.lossy_restores, self.lineage.losses = lineage, lossy, losses
        self.proposer.resolve()
        self.proposer.fingerprint = None

    @property
    def gradients_wait(self) -> bool:
        """Return whether gradients wait on this rank for an optimizer's step."""
        return self._gradients.waiting or self._target.tracked.waiting

    @property
    def has_left_one(self) -> bool:
        """Return whether a checkpoint is left to the next step, after which there may be none."""
        return (self.deferred and self.behind) or self.outcomes.to_be_made_again

    def unchanged(self) -> CheckpointReport:
        """Return the last checkpoint's report, after ``begin`` found that it holds everything."""
        assert self._last is not None
        return replace(self._last, unchanged=True)

    @gc_paused()  # a collection may take longer than all else here
    def begin(self, step: int, tell: bool = False) -> Begun:
        """Begin a checkpoint if all ranks can; training may go on when this returns.

        Args:
            tell: whether ``raise_failure`` reports a failure even if failures are allowed.

        Raises:
            SaveFailed: the ranks are at different steps.
            RootInUse: another run writes to the root.
        """
        started = time.monotonic() - self._waited  # training waits since then
        self.writer.progressed()
        try:
            self._claim.take()
            facts = self._ranks.on_all_ranks(lambda: self._look(step))
        except OSError as error:
            self.outcomes.failed(SaveFailed(f"nothing can be saved to {self._root}: {error}"), tell)
            return Begun.FAILED
        self._hear(facts)
        if self._image is not None and any(fact.full for fact in facts):
            self._image.require_full()
        require_one_step(facts)
        if (refusal := self._refusal(step, facts, tell)) is not None:
            return refusal
        if any(fact.parted for fact in facts):
            self._background.ranks.meet_again()
        same_rows = facts[0].committed and not any(fact.modified for fact in facts)
        if same_rows and not self.proposer.is_changed():
            message = "step %d is committed already, as %s: nothing is saved"
            self.log(message, step, self.lineage.previous and self.lineage.previous.id)
            return Begun.UNCHANGED
        proposal = self.proposer.agreed(facts)
        previous, known = self.lineage.previous, proposal.header.previous
        if previous is not None and (known is None or known.checksum != previous.checksum):
            # This rank has dropped its marks for a commit that rank 0 never heard of.
            self._target.tracked.mark_all()
        self._must_tell = tell
        unite = united_later(self._target.tracked, self._background, self._ranks)
        self._take(proposal, started, unite)
        return Begun.YES

    def _look(self, step: int) -> Facts:
        """Return this rank's facts about the next checkpoint."""
        publishing = self.publishing()
        busy = self._running is not None or publishing
        facts = self.proposer.look(
            step,
            waiting=self.gradients_wait,
            busy=busy,
            hangs=not busy and self._background.hangs,
            failed=self.outcomes.has_failure,
        )
        return replace(facts, publishing=publishing, parted=self._background.ranks.parted)

    def _hear(self, facts: list[Facts]) -> None:
        """Go on from a compacted copy that rank 0 tells of, while no checkpoint is on its way."""
        if any(fact.busy for fact in facts):
            return  # that checkpoint builds on the old chain; rank 0 tells again
        self.going_on.heard(facts[0].copied)
        previous = self.lineage.previous
        if self._last is not None and previous is not None and self._last.id != previous.id:
            self._last = self.lineage.report(Progress())  # the copy of the last checkpoint

    def _refusal(self, step: int, facts: list[Facts], tell: bool) -> Begun | None:
        """Return why no checkpoint can be begun, by the facts of all ranks; None if one can."""
        self.deferred = any(fact.waiting for fact in facts)
        if self.deferred:
            if (message := self._put_off.again(step, self._gradients.named)) is not None:
                self.log("%s", message, level=logging.WARNING)
            return Begun.DEFERRED
        self._put_off.end()
        if any(fact.failed for fact in facts):
            return Begun.FAILED  # ``outcome`` raises it on the ranks where it failed
        if hanging := [rank for rank, fact in enumerate(facts) if fact.hangs]:
            self.outcomes.failed(still_hanging(step, hanging), tell)
            return Begun.FAILED
        self.deferred = self.behind = any(fact.publishing for fact in facts)
        if any(fact.busy for fact in facts):
            if not (self._skipped or self.deferred):  # logged once: a clock may ask again and again
                message = "step %d: no checkpoint while the one before is still being written"
                self.log(message, step, level=logging.WARNING)
            self._skipped = not self.deferred
            return Begun.BUSY
        self._skipped = False
        return None

    def settle(self, wait: bool) -> None:
        """Note the outcome of the checkpoint in the background: wait, or look at the end of a step.

        Marks of one that failed are merged back here: only the training thread may write marks.
        """
        save, self._waited = self._running, 0.0
        if save is None or not (wait or save.common_step.reached()):
            return
        started = time.monotonic()
        await_save(save)
        self._waited = time.monotonic() - started
        try:
            manifest = save.result()
        except BaseException as error:
            if save.cut is not None:
                self._target.tracked.merge(save.cut)
            self._links.failed(save.links)
            if isinstance(error, RowsOverwritten):  # on all ranks, lest each of them fail once
                self._target.tracked.expect_writes()
            self.outcomes.failed(error, self._must_tell)
            self._forget_running()  # last: after an interruption above, this runs again
            return
        self.lineage.committed(manifest)  # first: the next checkpoint builds on these rows
        self._links.committed(save.links, manifest)
        if self._image is not None:
            self._image.committed(manifest.id, manifest.lineage, self.lineage.lossy_restores)
        if save.cut is not None:
            self._target.tracked.forget(save.cut)
        self.going_on.committed()  # before anything else is cut
        self._forget_running()  # last: after an interruption above, this runs again
        self.proposer.fingerprint = save.fingerprint
        self._last = self.lineage.report(save.progress)
        self.outcomes.committed(self._last)
        self.log("%s", self._last)
        if self._ranks.rank == 0:
            self.writer.prune(manifest)
        self.outcomes.tell(self._last)

    def log(self, message: str, *values: object, level: int = logging.INFO) -> None:
        """Log a message once for all ranks."""
        if self._ranks.rank == 0:
            logger.log(level, message, *values)

    def close(self, failed: bool = False) -> None:
        """Stop the background without waiting for a checkpoint.

        Running deletions are waited for, for a minute, unless the process ends since it ``failed``.
        """
        self._claim.close()
        self.going_on.give_up()
        if self._running is not None:  # the hooks are gone: training overwrites rows unprotected
            self._running.end_protection()
        self._forget_running()
        self._gradients.close()
        self._background.close()
        self.writer.close(failed)

    def _forget_running(self) -> None:
        atexit.unregister(self._finish_at_exit)
        self._running, self._finish_at_exit = None, lambda: None

    def _take(self, proposal: Proposal, started: float, unite: bool) -> None:
        snapshot: Snapshot | Exception
        cut: Cut | None = None
        links: Transaction | None = None
        asked = time.monotonic()
        try:
            try:
                if self._image is not None:  # first: the cut's marks count until it is committed
                    self._image.cut(proposal.id, proposal.header.parent is None)
                since = _MARKS.get(proposal.decision)
                snapshot, cut = take_snapshot(
                    self._model, self._target.tracked, self._declared, since
                )
                links = self._links.begin(proposal, snapshot, self.proposer.quantization)
            except Exception as error:
                snapshot = error
            copies = self._background.destination.copies
            if copies is not None:
                copies.begin(proposal.id, self.lineage.ancestors(proposal.header.parent))
            save = self._background.begin(
                proposal,
                snapshot,
                cut,
                self.proposer.quantization,
                started,
                asked,
                before_commit=partial(self.writer.before_commit, proposal),
                after_commit=partial(self.writer.after_commit, proposal),
                unite=unite,
                links=links,
            )
            self._running, self._finish_at_exit = save, partial(finish_at_exit, save)
            atexit.register(self._finish_at_exit)
        except BaseException:
            self._links.failed(links)
            if cut is not None:
                self._target.tracked.merge(cut)
            else:  # interrupted, possibly after the marks were cut and before they were ours
                self._target.tracked.mark_all()
            raise
