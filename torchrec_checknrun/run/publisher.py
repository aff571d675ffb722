"""Publish between checkpoints: small differentials of what a prediction depends on, for followers.

A publication is a checkpoint in a root of its own, without optimizers and states: it is cut,
written, committed and pruned as any other, by the same background, one at a time with checkpoints,
which go first. Its rows have marks of their own. Training never hears of its failures but by the
log: the rows stay marked for the next one.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.options.publish import check_publishable
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.lineage import Lineage, Proposal
from torchrec_checknrun.root.policy import Decision
from torchrec_checknrun.root.report import CheckpointReport
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run.replicas import united_later
from torchrec_checknrun.run.root_claim import RootClaim
from torchrec_checknrun.run.saver import Saver
from torchrec_checknrun.run.waiting import await_save, finish_at_exit
from torchrec_checknrun.save.background import Background, Destination
from torchrec_checknrun.save.parent_content import ParentContent
from torchrec_checknrun.save.process import require_shared
from torchrec_checknrun.save.save import Save
from torchrec_checknrun.schedule.schedule import Schedule
from torchrec_checknrun.schedule.triggers import Moment
from torchrec_checknrun.snapshot.publication import take_publication
from torchrec_checknrun.snapshot.snapshot import Snapshot
from torchrec_checknrun.threads import gc_paused

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

PATIENCE_SECONDS = 60.0
"""Longest silence of the publications' storage, for which checkpoints would have to wait."""
LONGEST_PAUSE = 64
"""Intervals until the next attempt, at most, while a claim of the root fails in training."""
MOST_LINKS = 1000
"""Publications upon a base, however small: a follower that starts reads them all."""


@dataclass(frozen=True)
class CheapChain:
    """The policy of publications: a new base once the links since the last one cost more than it.

    Attributes:
        most_links: links after which a base follows at any rate.
    """

    most_links: int = MOST_LINKS

    def decide(self, history: Sequence[Manifest]) -> Decision:
        base, *links = (manifest.stored_bytes for manifest in history)
        cheap = sum(links) <= base and len(links) < self.most_links
        return Decision.SINCE_LAST if cheap else Decision.FULL


@dataclass(frozen=True)
class Due:
    """A trigger by rank 0's clock, which rests while a checkpoint is on its way."""

    seconds: float
    rests: Callable[[], bool]
    by_step = False

    def due(self, now: Moment) -> bool:
        return now.seconds >= self.seconds and not self.rests()


@dataclass(frozen=True)
class Readiness:
    """One rank's report when a publication is due.

    Attributes:
        holds_up: what keeps this rank from publishing now; None: nothing.
        base: whether rows were written or moved here that marks don't tell of.
        previous: checksum of the last publication, as far as this rank knows.
        proposal: rank 0's; None on other ranks, and where rank 0 is held up.
        parted: whether the background can't reach the other ranks any more.
    """

    step: int
    holds_up: str | None
    base: bool
    previous: str | None
    proposal: Proposal | None
    parted: bool


class Publisher:
    """The training thread's side of publishing; use it on all ranks alike.

    Args:
        saver: of the checkpoints, which go first.

    Attributes:
        last: the report of the last publication that was committed; None before the first.
        failures: publications that failed since then.

    Raises:
        UnsupportedTable, UnsupportedState, ValueError: see ``check_publishable``.
    """

    def __init__(
        self, options: Options, target: Target, ranks: Ranks, background: Background, saver: Saver
    ) -> None:
        wanted = options.publish
        assert wanted is not None
        check_publishable(options, target.tracked, ranks.world_size)
        self._seconds = options.timeout_seconds
        root = wanted.folder(min(options.timeout_seconds, PATIENCE_SECONDS))
        if options.background == "process":
            require_shared(root)
        self._model, self._tracked = options.model, target.tracked
        self._tables = wanted.chosen(list(target.tracked.tables))
        self._ranks, self._background, self._saver = ranks, background, saver
        self._quantization = wanted.quantization
        self._lineage = Lineage()
        self._writer = RootWriter(root, self._lineage, Retention(wanted.keep), publishes=True)
        self._writer.settled = True  # no run goes on from publications
        self._claim = RootClaim(root, ranks, self._writer)
        self._to = Destination(root, ParentContent(options.dense))
        self._interval = wanted.every_seconds
        self._pause, self._paused_until = 1, 0.0
        """After an attempt that failed while training waited: intervals, and when they are over."""
        self._schedule = Schedule([Due(wanted.every_seconds, self._rests)], ranks)
        self._running: Save | None = None
        self._finish_at_exit: Callable[[], None] = lambda: None
        self._shards: list[TrackedShard] = []
        self._restores = 0
        self.last: CheckpointReport | None = None
        self.failures = 0
        saver.publishing = lambda: self._running is not None

    def step(self, step: int) -> None:
        """Publish at the end of a step, if that is due."""
        self._writer.progressed()
        try:
            if self._schedule.due(step):
                self.begin(step)
        except Exception as error:
            self._failed(error)

    @gc_paused()
    def begin(self, step: int) -> bool:
        """Begin a publication if all ranks can; return whether it is on its way, on all alike."""
        started = time.monotonic()
        try:
            self._claim.take()
            facts = self._ranks.on_all_ranks(lambda: self._look(step))
        except Exception as error:
            self._schedule.saved()
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._paused_until = time.monotonic() + self._pause * self._interval
            self._failed(error)
            return False
        self._pause = 1
        held = sorted({fact.holds_up for fact in facts if fact.holds_up is not None})
        if held or len({fact.step for fact in facts}) > 1:
            if self._ranks.rank == 0:
                logger.debug("step %d: nothing is published: %s", step, held or "not on all ranks")
            return False
        proposal = facts[0].proposal
        assert proposal is not None, "rank 0 is not held up"
        if any(fact.base or fact.previous != facts[0].previous for fact in facts):
            self._lineage.force_full()  # also for the next one, should this one fail
            proposal = proposal.as_full()
        self._schedule.saved()
        if any(fact.parted for fact in facts):
            self._background.ranks.meet_again()
        self._take(proposal, started)
        return True

    def settle(self, wait: bool) -> None:
        """Note the outcome of the publication on its way; arguments as of ``Saver.settle``."""
        save = self._running
        if save is None or not (wait or save.common_step.reached()):
            return
        await_save(save, self._seconds)
        try:
            manifest = save.result()
        except BaseException as error:
            if save.cut is not None:
                self._tracked.merge(save.cut)
            self._forget_running()
            self._failed(error)
            if not isinstance(error, Exception):
                raise
            return
        self._lineage.committed(manifest)
        if save.cut is not None:
            self._tracked.forget(save.cut)
        self._forget_running()
        self.failures = 0
        self.last = self._lineage.report(save.progress)
        if self._ranks.rank == 0:
            logger.info("published: %s", self.last)
            self._writer.prune(manifest)

    def publish(self, step: int, wait: bool) -> CheckpointReport | None:
        """Publish now; arguments and answer as of ``Checkpointer.publish``."""
        if not self.begin(step) or not wait:
            return None
        self.settle(wait=True)
        return None if self.failures else self.last

    def before_restore(self) -> None:
        """Wait for the publication on its way; the next one is a base, whatever is restored: rows
        that go back carry no mark.
        """
        self.settle(wait=True)
        self._lineage.force_full()

    def close(self, failed: bool = False) -> None:
        """Stop without waiting for a publication; arguments as for ``Saver.close``."""
        self._claim.close()
        if self._running is not None:
            self._running.end_protection()
        self._forget_running()
        self._schedule.close(failed)
        self._writer.close(failed)

    def _rests(self) -> bool:
        """Tell rank 0 whether there is no use in asking the other ranks."""
        busy = self._saver.running is not None or self._saver.deferred
        return busy or time.monotonic() < self._paused_until

    def _look(self, step: int) -> Readiness:
        """Return this rank's facts about the next publication."""
        self._tracked.refresh()
        if self._shards != self._tracked.shards or self._restores != self._tracked.restores:
            self._lineage.force_full()
            self._shards, self._restores = list(self._tracked.shards), self._tracked.restores
        if self._writer.lost_parent:
            self._lineage.force_full()
            self._writer.lost_parent = False
        held = self._held_up()
        previous = self._lineage.previous
        proposal = None
        if self._ranks.rank == 0 and held is None:
            rows = {name: self._tracked.tables[name].rows for name in self._tables}
            widths = self._quantization.widths(rows)
            proposal = self._writer.propose(CheapChain(), self._quantization.width, widths, step)
        checksum = None if previous is None else previous.checksum
        parted = self._background.ranks.parted
        return Readiness(step, held, self._lineage.converted, checksum, proposal, parted)

    def _held_up(self) -> str | None:
        if self._saver.running is not None or self._saver.deferred:
            return "a checkpoint goes first"
        if self._running is not None:
            return "the publication before is still being written"
        if self._saver.gradients_wait:
            return "gradients wait for their optimizer"
        if self._background.hangs:
            return "a save that was given up has not come back yet"
        return None

    def _take(self, proposal: Proposal, started: float) -> None:
        """Cut and hand over to the background."""
        snapshot: Snapshot | Exception
        cut: Cut | None = None
        unite = united_later(self._tracked, self._background, self._ranks)
        asked = time.monotonic()
        try:
            try:
                whole = proposal.decision is Decision.FULL
                snapshot, cut = take_publication(self._tracked, self._tables, whole)
            except Exception as error:
                snapshot = error
            save = self._background.begin(
                proposal,
                snapshot,
                cut,
                self._quantization,
                started,
                asked,
                before_commit=partial(self._writer.before_commit, proposal),
                after_commit=partial(self._writer.after_commit, proposal),
                unite=unite,
                to=self._to,
            )
            self._running, self._finish_at_exit = save, partial(finish_at_exit, save)
            atexit.register(self._finish_at_exit)
        except BaseException:
            self._lineage.force_full()  # an interrupt: possibly after the marks were cut
            if cut is not None:
                self._tracked.merge(cut)
            raise

    def _failed(self, error: BaseException) -> None:
        """Log a failure, on the rank where it happened."""
        self.failures += 1
        logger.warning(
            "publication failed (%d in a row), its rows are part of the next one: %s",
            self.failures,
            error,
        )

    def _forget_running(self) -> None:
        atexit.unregister(self._finish_at_exit)
        self._running, self._finish_at_exit = None, lambda: None


def make_publisher(
    options: Options, target: Target, ranks: Ranks, background: Background, saver: Saver
) -> Publisher | None:
    """Make the publisher that the options ask for; None: nothing is published."""
    if options.publish is None:
        return None
    return Publisher(options, target, ranks, background, saver)
