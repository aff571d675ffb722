"""Save one checkpoint after the other: agree on it with all ranks, begin it, note its outcome.

All of this runs in the training thread; ``Background`` does the rest.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.dense.gradients import PendingGradients
from torchrec_checknrun.errors import CheckNRunError, SaveFailed
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.chain import Chain, resolve
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Decision, Full
from torchrec_checknrun.root.report import CheckpointReport, Progress
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.facts import Begun, Facts
from torchrec_checknrun.run.going_on import GoingOn
from torchrec_checknrun.run.options import Options
from torchrec_checknrun.run.root_claim import RootClaim
from torchrec_checknrun.run.waiting import await_save, finish_at_exit, still_hanging
from torchrec_checknrun.save.background import Background
from torchrec_checknrun.save.links import (
    HeldReferences,
    agreed,
    delta_tables,
    links_exceed_base,
)
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.snapshot.items import Fingerprint, Items, fingerprint
from torchrec_checknrun.snapshot.snapshot import Declared, Snapshot, take_snapshot, take_states
from torchrec_checknrun.threads import gc_paused

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MARKS = {
    Decision.FULL: None,
    Decision.SINCE_BASELINE: Consumer.BASELINE,
    Decision.SINCE_LAST: Consumer.LAST,
}


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
        quantization: the quantization in force, after the restores so far.
        deferred: whether a checkpoint was due while gradients waited for their optimizer.
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
        self.deferred = False
        self._root = options.root
        self._model = options.model
        self._target = target
        self._ranks = ranks
        self._background = background
        self._policy = options.policy
        self._chosen = options.quantization
        self._resolve()
        self._max_failures = options.max_failures
        self._callbacks = options.callbacks
        self._declared = Declared(
            target.states, frozenset(target.per_rank), target.replicated, target.buffers
        )
        self._gradients = PendingGradients(target.states.values())
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
        self._running: Save | None = None
        self._finish_at_exit: Callable[[], None] = lambda: None
        self._skipped = False
        self._waited = 0.0
        """Seconds waited for the checkpoint before the one that may be begun now."""
        self._failures = 0
        self._error: BaseException | None = None
        self._must_tell = False
        """Whether somebody waits for the running checkpoint and must hear of its failure."""
        self._report: CheckpointReport | None = None
        self._last: CheckpointReport | None = None
        self._fingerprint: Fingerprint | None = None
        """Of the last checkpoint's content beside table rows; None if unknown."""

    @property
    def hangs(self) -> bool:
        """Whether a checkpoint that was given up still uses its snapshot."""
        return self._background.hangs

    @property
    def running(self) -> Save | None:
        """The checkpoint that was begun and whose outcome was not noted yet."""
        return self._running

    def _resolve(self) -> None:
        """Note the quantization in force after the restores so far."""
        self.quantization: Quantization = self._chosen.resolved(self.lineage.lossy_restores)
        self._bits = self.quantization.width

    def progressed(self) -> None:
        """Note a training step; claim the root at the first one.

        Raises:
            RootInUse: another run writes to the root.
        """
        self.writer.progressed()
        self._claim.take_early()

    def before_restore(self) -> None:
        """Wait for a running pruning, which doesn't know what is going to be restored; end a
        running compaction, which the restored state may not descend from.
        """
        self.going_on.give_up()
        self.writer.wait_for_pruning()
        self._links.forget()  # two sets of them would take too much memory

    def restored(
        self,
        chain: Chain,
        converted: bool,
        forks: bool,
        partly: bool,
        references: list[References],
    ) -> None:
        """Note that the model is in a checkpoint's state; see ``Lineage.restored``.

        Args:
            partly: whether something was skipped, so that the model holds more than the checkpoint.
            references: what this rank's shards restore to, of tables stored as differences.
        """
        self.lineage.restored(chain, converted, forks)
        self._resolve()
        tracked = self._target.tracked
        self._links.restored(chain.manifests, references, tracked, self.quantization)
        self._ranks.on_all_ranks(lambda: self.writer.restored(chain))  # rank 0 writes to the root
        self._last = self.lineage.report(Progress())
        self._fingerprint = None
        if not partly:
            with suppress(Exception):  # the next save reports it
                self._fingerprint = self._look_at_states()

    def recovered(
        self,
        chain: Chain | None,
        lineage: str,
        lossy: int,
        full: bool,
        losses: tuple[Loss, ...] = (),
    ) -> None:
        """Note that the model is in a later state than a chain's head, from which it descends.

        Args:
            lineage: the name of the lineage.
            lossy: restores from lossy checkpoints so far, this one being none.
            full: whether the next checkpoint must be full.
            losses: what partial recoveries have cost so far.
        """
        if chain is not None:
            self.lineage.restored(chain, full, forks=False)
            self._ranks.on_all_ranks(lambda: self.writer.restored(chain))
            self._last = self.lineage.report(Progress())
        self._links.forget()  # images hold none
        self.lineage.id, self.lineage.lossy_restores = lineage, lossy
        self.lineage.losses = losses
        self._resolve()
        self._fingerprint = None

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients wait on this rank for an optimizer's step."""
        return self._gradients.waiting or self._target.tracked.waiting

    def unchanged(self) -> CheckpointReport:
        """Return the last checkpoint's report, after ``begin`` found that it holds everything."""
        assert self._last is not None
        return replace(self._last, unchanged=True)

    def has_unsaved_steps(self, step: int) -> bool:
        """Tell whether there is anything that the last checkpoint doesn't hold; a collective."""
        previous = self.lineage.previous
        if not self._ranks.from_rank_0(lambda: step > 0):
            return False
        self._ranks.on_all_ranks(self._target.tracked.refresh)
        own = previous is None or previous.step != step
        if any(self._ranks.gather(own or self._target.tracked.is_modified(Consumer.LAST))):
            return True
        return self._is_changed()

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
            self._note(SaveFailed(f"nothing can be saved to {self._root}: {error}"), tell)
            return Begun.FAILED
        self._hear(facts)
        if self._image is not None and self.lineage.converted:
            self._image.require_full()
        steps = [fact.step for fact in facts]
        if len(set(steps)) > 1:
            raise SaveFailed(
                f"the ranks are at different steps {steps}: call step() or save() on all ranks at "
                "the same point of the training loop"
            )
        refusal = self._refusal(step, facts, tell)
        if refusal is not None:
            return refusal
        same_rows = facts[0].committed and not any(fact.modified for fact in facts)
        if same_rows and not self._is_changed():
            message = "step %d is committed already, as %s: nothing is saved"
            self.log(message, step, self.lineage.previous and self.lineage.previous.id)
            return Begun.UNCHANGED
        proposal = facts[0].proposal
        assert proposal is not None
        proposal = agreed(proposal, self._references(facts), self._delta_tables())
        previous = self.lineage.previous
        known = proposal.header.previous
        if previous is not None and (known is None or known.checksum != previous.checksum):
            # This rank has dropped its marks for a commit that rank 0 never heard of.
            self._target.tracked.mark_all()
        replicas = [s for s in self._target.tracked.shards if s.local.replicated]
        later = self._background.copies_later and all(s.local.weight.is_cpu for s in replicas)
        if not later:
            self._target.tracked.all_reduce_marks(self._ranks.group)
        self._must_tell = tell
        unite = later and bool(replicas) and self._ranks.world_size > 1
        self._take(proposal, started, unite)
        return Begun.YES

    def _hear(self, facts: list[Facts]) -> None:
        """Go on from a compacted copy that rank 0 tells of, while no checkpoint is on its way."""
        if any(fact.busy for fact in facts):
            return  # that checkpoint builds on the old chain; rank 0 tells again
        self.going_on.heard(facts[0].copied)
        previous = self.lineage.previous
        if self._last is not None and previous is not None and self._last.id != previous.id:
            self._last = self.lineage.report(Progress())  # the copy of the last checkpoint

    def _references(self, facts: list[Facts]) -> list[str | None]:
        """Return what all ranks' references belong to; a collective after a switch to a copy."""
        if facts[0].copied is None:
            return [fact.references for fact in facts]
        # The other ranks have heard of the copy since they told of their references.
        own = self._links.belong_to(self._target.tracked, self.quantization)
        return self._ranks.gather(own)

    def _refusal(self, step: int, facts: list[Facts], tell: bool) -> Begun | None:
        """Return why no checkpoint can be begun, by the facts of all ranks; None if one can."""
        self.deferred = any(fact.waiting for fact in facts)
        if self.deferred:
            message = (
                "gradients wait for their optimizer: the checkpoint of step %d is put off until "
                "its step() applies them, or zero_grad() drops them"
            )
            self.log(message, step, level=logging.WARNING)
            return Begun.DEFERRED
        if any(fact.failed for fact in facts):
            return Begun.FAILED  # ``outcome`` raises it on the ranks where it failed
        if hanging := [rank for rank, fact in enumerate(facts) if fact.hangs]:
            self._note(still_hanging(step, hanging), tell)
            return Begun.FAILED
        if any(fact.busy for fact in facts):
            if not self._skipped:  # logged once: a clock may ask again and again
                message = "step %d: no checkpoint while the one before is still being written"
                self.log(message, step, level=logging.WARNING)
            self._skipped = True
            return Begun.BUSY
        self._skipped = False
        return None

    def settle(self, wait: bool) -> None:
        """Note the outcome of the checkpoint in the background, once that is known.

        Marks of a checkpoint that was not committed are merged back here, since only the training
        thread may write marks.
        """
        save, self._waited = self._running, 0.0
        if save is None or not (wait or save.done):
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
            self._note(error, self._must_tell)
            self._forget_running()  # last: after an interruption above, this runs again
            return
        self._failures = 0
        self.lineage.committed(manifest)  # first: the next checkpoint builds on these rows
        self._links.committed(save.links, manifest)
        if self._image is not None:
            self._image.committed(manifest.id, manifest.lineage, self.lineage.lossy_restores)
        if save.cut is not None:
            self._target.tracked.forget(save.cut)
        self.going_on.committed()  # before anything else is cut
        self._forget_running()  # last: after an interruption above, this runs again
        self._fingerprint = save.fingerprint
        self._last = self.lineage.report(save.progress)
        self._report = self._last
        self.log("%s", self._report)
        if self._ranks.rank == 0:
            self.writer.prune(manifest)
        for callback in self._callbacks:
            try:
                callback(self._report)
            except Exception:
                logger.exception("the callback %r failed", callback)

    def _note(self, error: BaseException, tell: bool) -> None:
        """Keep a failure for the caller, or only log it where that is allowed."""
        self._failures += 1
        if tell or self._failures > self._max_failures or not isinstance(error, Exception):
            self._error = error
        else:
            logger.warning("failure %d of %d: %s", self._failures, self._max_failures, error)

    def outcome(self) -> CheckpointReport | None:
        """Return the report that ``settle`` has noted since the last call; None without one.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: a checkpoint was not committed.
        """
        self.raise_failure()
        report, self._report = self._report, None
        return report

    def raise_failure(self) -> None:
        """Raise as ``outcome`` does, but leave a report for the next call."""
        error, self._error = self._error, None
        if error is not None:
            self._report = None
            raise error

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
        if self._running is not None and self._running.rows is not None:
            self._running.rows.close()  # the hooks are gone: training overwrites rows unprotected
        self._forget_running()
        self._gradients.close()
        self._background.close()
        self.writer.close(failed)

    def _forget_running(self) -> None:
        atexit.unregister(self._finish_at_exit)
        self._running, self._finish_at_exit = None, lambda: None

    def _look(self, step: int) -> Facts:
        """Return this rank's facts about the next checkpoint, for rank 0's decision."""
        tracked = self._target.tracked
        tracked.refresh()
        waiting = self.gradients_wait
        busy = self._running is not None
        copied = None if busy else self.going_on.outcome()
        failed = self._error is not None
        hangs = not busy and self._background.hangs
        # The same on all ranks. Not while a checkpoint is on its way, whose commit would end the
        # need for a full one.
        if (tracked.converted or self.writer.lost_parent) and not busy:
            self.lineage.force_full()
            tracked.converted = self.writer.lost_parent = False
        previous = self.lineage.previous
        # Marks are searched only where the answer matters, since that reads all of them. A loop
        # that never calls ``step`` is always at step 0, whatever was trained.
        again = step > 0 and previous is not None and previous.step == step
        modified = not again or tracked.is_modified(Consumer.LAST)
        references = self._links.belong_to(tracked, self.quantization)
        if self._ranks.rank != 0 or waiting or busy or failed or hangs:
            return Facts(
                step, waiting, busy, hangs, failed, modified, None, False, references, copied
            )
        committed = again and self._is_committed(step)
        proposal = self._decide(step)
        return Facts(
            step, waiting, busy, hangs, failed, modified, proposal, committed, references, copied
        )

    def _is_changed(self) -> bool:
        """Tell whether anything but table rows differs from the last checkpoint, on any rank."""
        try:
            own = self._look_at_states() != self._fingerprint
        except Exception:  # a save reports it
            own = True
        return any(self._ranks.gather(own))

    def _look_at_states(self) -> Fingerprint:
        """Return the fingerprint of a checkpoint's content beside table rows, taken now."""
        snapshot = take_states(self._model, self._target.tracked, self._declared)
        items = Items.of(snapshot, self.quantization, self._background.memory.chunk_bytes)
        return fingerprint(items.digests(), snapshot.progress)

    def _is_committed(self, step: int) -> bool:
        """Tell whether this step is committed, in the widths in force, and can be restored."""
        last = self.lineage.previous
        widths = self.quantization.widths(self._rows())
        if last is None or not self.lineage.holds(step, widths):
            return False
        try:
            resolve(self._root, last.id)
        except CheckNRunError as error:
            logger.warning("the last checkpoint is damaged, the next one is full: %s", error)
            self.lineage.force_full()
            return False
        return True

    def _rows(self) -> dict[str, int]:
        return {name: shape.rows for name, shape in self._target.tracked.tables.items()}

    def _decide(self, step: int) -> Proposal:
        widths = self.quantization.widths(self._rows())
        deltas, previous = self._delta_tables(), self.lineage.previous
        others = previous is not None and previous.deltas.keys() != deltas
        full = others or links_exceed_base(self.lineage.history)
        return self.writer.propose(Full() if full else self._policy, self._bits, widths, step)

    def _delta_tables(self) -> frozenset[str]:
        """Name the tables to be stored as differences; the same on all ranks."""
        return delta_tables(self._target.tracked, self.quantization)

    def _take(self, proposal: Proposal, started: float, unite: bool) -> None:
        snapshot: Snapshot | Exception
        cut: Cut | None = None
        links: Transaction | None = None
        asked = time.monotonic()
        try:
            try:
                if self._image is not None:  # first: the cut's marks count until it is committed
                    self._image.cut(proposal.id, proposal.header.parent is None)
                snapshot, cut = take_snapshot(
                    self._model, self._target.tracked, self._declared, _MARKS[proposal.decision]
                )
                links = self._links.begin(proposal, snapshot, self.quantization)
            except Exception as error:
                snapshot = error
            if self._background.copies is not None:
                chain = self.lineage.ancestors(proposal.header.parent)
                self._background.copies.begin(proposal.id, chain)
            save = self._background.begin(
                proposal,
                snapshot,
                cut,
                self.quantization,
                started,
                asked,
                before_commit=partial(self.writer.before_commit, proposal),
                after_commit=self.writer.after_commit,
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
