"""One checkpoint after the other: all ranks agree on it, it is begun, and what became of it is
noted. All of this runs in the training thread; the rest is ``Background``'s.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import ClassVar

from torch import nn

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.dense.gradients import PendingGradients
from torchrec_checknrun.errors import CheckNRunError, RootInUse, SaveFailed
from torchrec_checknrun.model.marks import Consumer, Cut
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.restore.shared_root import require_shared
from torchrec_checknrun.root.chain import Chain, resolve
from torchrec_checknrun.root.lease import FOLDER, Holder
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Decision, Policy
from torchrec_checknrun.root.report import CheckpointReport, Progress, checkpoint_report
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.facts import Facts
from torchrec_checknrun.run.waiting import await_save, last_words, still_hanging
from torchrec_checknrun.save.background import Background
from torchrec_checknrun.save.items import Fingerprint, Items, fingerprint
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.save.snapshot import Declared, Snapshot, take_snapshot, take_states
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

Callback = Callable[[CheckpointReport], None]

_MARKS = {
    Decision.FULL: None,
    Decision.SINCE_BASELINE: Consumer.BASELINE,
    Decision.SINCE_LAST: Consumer.LAST,
}


class Begun(Enum):
    """What came of the wish to begin a checkpoint, the same on all ranks."""

    YES = "it is on its way"
    DEFERRED = "gradients wait for their optimizer"
    BUSY = "one is still being written"
    FAILED = "the one before failed, or the storage did: see ``Saver.raise_failure``"
    UNCHANGED = "the last one, of the same step, holds all of it"


class Saver:
    """Saves a model's checkpoints, in a lineage.

    Args:
        target: the model and its states.
        retention: which checkpoints are deleted after a commit; None: none.
        max_failures: how many in a row are only logged.
        callbacks: called with the report of every committed checkpoint; what they raise is logged.

    Attributes:
        lineage: what was committed or restored last.
        writer: of use on rank 0 only.
        deferred: a checkpoint was due, but gradients waited for their optimizer.
    """

    _writing: ClassVar[weakref.WeakSet[Saver]] = weakref.WeakSet()
    """Those of this process that have claimed their root and are not closed."""

    def __init__(
        self,
        root: Folder,
        model: nn.Module,
        target: Target,
        ranks: Ranks,
        background: Background,
        *,
        policy: Policy,
        quantization: Quantization,
        retention: Retention | None,
        max_failures: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.lineage = Lineage()
        self.deferred = False
        self._root = root
        self._model = model
        self._target = target
        self._ranks = ranks
        self._background = background
        self._policy = policy
        self._quantization = quantization
        self._max_failures = max_failures
        self._callbacks = tuple(callbacks)
        self._declared = Declared(
            target.states, frozenset(target.per_rank), target.replicated, target.buffers
        )
        self._gradients = PendingGradients(target.states.values())
        self.writer = RootWriter(root, self.lineage, retention)
        self._claimed = self._claimed_early = self._seen = False
        self._running: Save | None = None
        self._finish_at_exit: Callable[[], None] = lambda: None
        self._skipped = False
        self._waited = 0.0
        """Seconds, for the checkpoint before the one that may be begun now."""
        self._failures = 0
        self._error: BaseException | None = None
        self._must_tell = False
        """Of the running checkpoint, if it fails: somebody waits for it."""
        self._report: CheckpointReport | None = None
        self._last: CheckpointReport | None = None
        self._fingerprint: Fingerprint | None = None
        """Of what the last checkpoint holds beside table rows; None if that isn't known."""

    @property
    def hangs(self) -> bool:
        """Whether a checkpoint that was given up still uses what it was begun with."""
        return self._background.hangs

    @property
    def running(self) -> Save | None:
        """The checkpoint that was begun and of which nothing was noted yet."""
        return self._running

    @property
    def quantization(self) -> Quantization:
        """What rows are stored in now."""
        return self._quantization.resolved(self.lineage.lossy_restores)

    def claim(self) -> None:
        """Makes this run the only one that writes to the root, if it isn't yet.

        Raises:
            RootInUse: another one does, or another Checkpointer of this process.
            RootNotShared: not all ranks see the claim.
        """
        if not self._claimed:
            self._ranks.from_rank_0(self._claim)
            self._claimed = True
            Saver._writing.add(self)
        if not self._seen:
            name = self.writer.lease.claim.name if self._ranks.rank == 0 else ""
            require_shared(self._root, self._ranks, FOLDER, name)
            self._seen = True

    def claim_early(self) -> None:
        """The same at a run's first step, so that two runs in one root hear of it at once; storage
        that fails then is asked again when something is to be saved.

        Raises:
            RootInUse: another run writes to the root.
        """
        self.writer.progressed()
        if self._claimed_early:
            return
        self._claimed_early = True
        try:
            self.claim()
        except OSError as error:
            self.log("the root was not claimed yet: %s", error, level=logging.WARNING)

    def _claim(self) -> None:
        here = Holder.this_process()
        for other in Saver._writing:
            if other._root.url == self._root.url and other.writer.lease.claim.holder == here:
                raise RootInUse(
                    f"another Checkpointer of this process writes to {self._root} and was not "
                    "closed: close() it first, or give this one a root of its own"
                )
        self.writer.claim()

    def before_restore(self) -> None:
        """Lets a pruning end: it doesn't know what is going to be restored."""
        self.writer.wait_for_pruning()

    def restored(self, chain: Chain, converted: bool, forks: bool, partly: bool) -> None:
        """The model is in a checkpoint's state; see ``Lineage.restored``.

        Args:
            partly: something was skipped: the checkpoint doesn't hold all that there is.
        """
        self.lineage.restored(chain, converted, forks)
        self._ranks.on_all_ranks(lambda: self.writer.restored(chain))  # rank 0 writes to the root
        self._last = checkpoint_report(chain.head, self.lineage.chain_length, Progress())
        self._fingerprint = None
        if not partly:
            with suppress(Exception):  # the next save will say it
                self._fingerprint = self._look_at_states()

    def unchanged(self) -> CheckpointReport:
        """The report of the last checkpoint, after ``begin`` has found that it holds all of it."""
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

    def begin(self, step: int, tell: bool = False) -> Begun:
        """Begins a checkpoint if all ranks can; when it returns, training may go on.

        Args:
            tell: should it fail, ``raise_failure`` says so even if failures are allowed.

        Raises:
            SaveFailed: the ranks are at different steps.
            RootInUse: another run writes to the root.
        """
        started = time.monotonic() - self._waited  # training waits since then
        self.writer.progressed()
        try:
            self.claim()
            facts = self._ranks.on_all_ranks(lambda: self._look(step))
        except OSError as error:
            self._note(SaveFailed(f"nothing can be saved to {self._root}: {error}"), tell)
            return Begun.FAILED
        steps = [fact.step for fact in facts]
        if len(set(steps)) > 1:
            raise SaveFailed(
                f"the ranks are at different steps {steps}: call step() or save() on all ranks at "
                "the same point of the training loop"
            )
        self.deferred = any(fact.waiting for fact in facts)
        if self.deferred:
            message = (
                "gradients wait for their optimizer: the checkpoint of step %d is put off until "
                "its step() applies them, or zero_grad() drops them"
            )
            self.log(message, step, level=logging.WARNING)
            return Begun.DEFERRED
        if any(fact.failed for fact in facts):
            return Begun.FAILED  # whoever it failed for hears that from ``outcome``
        if hanging := [rank for rank, fact in enumerate(facts) if fact.hangs]:
            self._note(still_hanging(step, hanging), tell)
            return Begun.FAILED
        if any(fact.busy for fact in facts):
            if not self._skipped:  # said once: a clock may ask for it again and again
                message = "step %d: no checkpoint while the one before is still being written"
                self.log(message, step, level=logging.WARNING)
            self._skipped = True
            return Begun.BUSY
        self._skipped = False
        same_rows = facts[0].committed and not any(fact.modified for fact in facts)
        if same_rows and not self._is_changed():
            message = "step %d is committed already, as %s: nothing is saved"
            self.log(message, step, self.lineage.history[-1].id)
            return Begun.UNCHANGED
        proposal = facts[0].proposal
        assert proposal is not None
        previous = self.lineage.previous
        if previous is not None and previous.link != proposal.header.previous:
            # This rank has dropped its marks for a commit that rank 0 never heard of.
            self._target.tracked.mark_all()
        self._target.tracked.all_reduce_marks(self._ranks.group)
        self._must_tell = tell
        self._take(proposal, started)
        return Begun.YES

    def settle(self, wait: bool) -> None:
        """Takes note of what became of the checkpoint in the background, once that is known.

        Marks of one that was not committed are merged back: only this thread may do that.
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
            self._note(error, self._must_tell)
            self._forget_running()  # only now: whoever is interrupted above will merge again
            return
        self._failures = 0
        self.lineage.committed(manifest)  # first: what the next one builds on has these rows
        if save.cut is not None:
            self._target.tracked.forget(save.cut)
        self._forget_running()  # only now: whoever is interrupted above will note it again
        self._fingerprint = save.fingerprint
        self._last = checkpoint_report(manifest, self.lineage.chain_length, save.progress)
        self._report = self._last
        self.log("%s", self._report)
        if self._ranks.rank == 0:
            self.writer.prune(manifest.sequence)
        for callback in self._callbacks:
            try:
                callback(self._report)
            except Exception:
                logger.exception("the callback %r failed", callback)

    def _note(self, error: BaseException, tell: bool) -> None:
        """Keeps a failure for the caller, unless so many are only logged and he needn't know."""
        self._failures += 1
        if tell or self._failures > self._max_failures or not isinstance(error, Exception):
            self._error = error
        else:
            logger.warning("failure %d of %d: %s", self._failures, self._max_failures, error)

    def outcome(self) -> CheckpointReport | None:
        """What ``settle`` has found since this was last asked.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: a checkpoint was not committed.
        """
        self.raise_failure()
        report, self._report = self._report, None
        return report

    def raise_failure(self) -> None:
        """As ``outcome``, but a report stays for the next call."""
        error, self._error = self._error, None
        if error is not None:
            self._report = None
            raise error

    def log(self, message: str, *values: object, level: int = logging.INFO) -> None:
        """Once for all ranks."""
        if self._ranks.rank == 0:
            logger.log(level, message, *values)

    def close(self, failed: bool = False) -> None:
        """Ends what is in the background, without waiting for it; what is being deleted is waited
        for a minute, unless the process is to end since it ``failed``.
        """
        Saver._writing.discard(self)
        self._forget_running()
        self._gradients.close()
        self._background.close()
        self.writer.close(failed)

    def _forget_running(self) -> None:
        atexit.unregister(self._finish_at_exit)
        self._running = None

    def _look(self, step: int) -> Facts:
        """What this rank knows of the next checkpoint; rank 0 decides on it, if it can be."""
        tracked = self._target.tracked
        tracked.refresh()
        waiting = self._gradients.waiting or tracked.waiting
        busy = self._running is not None
        failed = self._error is not None
        hangs = not busy and self._background.hangs
        # So it is on all ranks. Not while one is on its way, whose commit would end the need for a
        # full one.
        if (tracked.converted or self.writer.lost_parent) and not busy:
            self.lineage.force_full()
            tracked.converted = self.writer.lost_parent = False
        previous = self.lineage.previous
        # Looked for only where it matters, since it takes a look at every mark. Who never calls
        # ``step`` is always at step 0, whatever was trained.
        again = step > 0 and previous is not None and previous.step == step
        modified = not again or tracked.is_modified(Consumer.LAST)
        if self._ranks.rank != 0 or waiting or busy or failed or hangs:
            return Facts(step, waiting, busy, hangs, failed, modified, None, False)
        committed = again and self._is_committed(step)
        proposal = self._decide(step)
        return Facts(step, waiting, busy, hangs, failed, modified, proposal, committed)

    def _is_changed(self) -> bool:
        """Whether anything beside table rows differs from the last checkpoint, on any rank."""
        try:
            own = self._look_at_states() != self._fingerprint
        except Exception:  # a save says what it is
            own = True
        return any(self._ranks.gather(own))

    def _look_at_states(self) -> Fingerprint:
        """The fingerprint of what a checkpoint would hold beside table rows."""
        snapshot = take_states(self._model, self._target.tracked, self._declared)
        items = Items.of(snapshot, self.quantization, self._background.chunk_bytes)
        return fingerprint(items.digests(), snapshot.progress)

    def _is_committed(self, step: int) -> bool:
        """Whether what would be saved is there and can be restored."""
        rows = {name: shape.rows for name, shape in self._target.tracked.tables.items()}
        if not self.lineage.holds(step, self.quantization.widths(rows)):
            return False
        try:
            resolve(self._root, self.lineage.history[-1].id)
        except CheckNRunError as error:
            logger.warning("the last checkpoint is damaged, the next one is full: %s", error)
            self.lineage.force_full()
            return False
        return True

    def _decide(self, step: int) -> Proposal:
        quantization = self.quantization
        rows = {name: shape.rows for name, shape in self._target.tracked.tables.items()}
        return self.lineage.propose(
            self._policy,
            quantization.width,
            quantization.widths(rows),
            step,
            self.writer.next_sequence(),
            self.writer.epoch,
        )

    def _take(self, proposal: Proposal, started: float) -> None:
        snapshot: Snapshot | Exception
        cut: Cut | None = None
        try:
            try:
                snapshot, cut = take_snapshot(
                    self._model,
                    self._target.tracked,
                    self._declared,
                    _MARKS[proposal.decision],
                )
            except Exception as error:
                snapshot = error
            check = partial(self.writer.before_commit, proposal.header)
            save = self._background.begin(
                proposal,
                snapshot,
                cut,
                self.quantization,
                started,
                before_commit=check,
                after_commit=self.writer.after_commit,
            )
            self._running, self._finish_at_exit = save, partial(last_words, save)
            atexit.register(self._finish_at_exit)
        except BaseException:
            if cut is not None:
                self._target.tracked.merge(cut)
            else:  # interrupted, perhaps, when it was taken and not yet ours
                self._target.tracked.mark_all()
            raise
