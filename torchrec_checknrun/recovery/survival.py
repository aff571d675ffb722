"""Keep images of a run while it trains, and go on from them when its processes have died.

Every decision is one answer for all ranks. Where images can't be used the reason is told, and the
caller restores from the storage.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torchrec_checknrun.dense.state_objects import holds_loader
from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.memory.agreement import Decision
from torchrec_checknrun.memory.gradient_buckets import settle_buckets
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.images import Images
from torchrec_checknrun.memory.sweep import sweep
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.recovery.decision import decide_by_storage
from torchrec_checknrun.recovery.held_restore import HeldRestore
from torchrec_checknrun.recovery.partial_recovery import LostRank, Side, meet
from torchrec_checknrun.recovery.saves import Saves
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.checkpoints import expect
from torchrec_checknrun.root.retention import original_of
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tiers.copies_folder import CopiesFolder
from torchrec_checknrun.tiers.host_copies import HostFiles
from torchrec_checknrun.tiers.peers import Peers
from torchrec_checknrun.tiers.priority_rows import PriorityRows

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


@dataclass(frozen=True)
class Recovered:
    """The state that images have brought back, the same on all ranks.

    Attributes:
        step: the step at whose end the model is.
        chain: the newest checkpoint's, from which the model descends; None without one.
        passed_over: newer checkpoints that could not be used, with the reasons.
        lost: the ranks whose rows are the chain's, since their images are gone.
        from_peers: of these, the ranks that have read a peer's copy.
        losses: what such recoveries have cost so far.
    """

    step: int
    chain: Chain | None
    passed_over: tuple[str, ...]
    lost: tuple[int, ...] = ()
    from_peers: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()
    world_size: int = 1


def make_image(options: Options, target: Target, ranks: Ranks) -> RankImage | None:
    """Open or prepare this rank's image; None if none is wanted.

    Raises:
        ImagesRefused: the model or the machine can't have images.
    """
    if not isinstance(options.survive, Images):
        return None
    return RankImage(
        options.survive,
        options.root.place,
        ranks.rank,
        ranks.world_size,
        options.model,
        target.tracked,
        options.states,
    )


def close_image(image: RankImage | None) -> None:
    """Close an image whose Checkpointer could not be made, for a later process."""
    if image is not None:
        image.close(remove=False)


def _priority_rows(options: Options, target: Target, ranks: Ranks) -> PriorityRows | None:
    wanted = None if options.partial is None else options.partial.priority
    if wanted is None:
        return None
    return PriorityRows(wanted, options.root, ranks.rank, target.tracked)


class Survival:
    """The images of all ranks, as the training thread of one sees them.

    Args:
        image: this rank's; None: the run has none.
        peers: copies in other ranks' memory; None: the run has none.
        host: copies in this machine's memory; None: the run has none.

    Attributes:
        reasons: why images were not used at the last try.
        half_way: whether a try has left the model half-way, on any rank, until it is restored.
    """

    def __init__(
        self,
        options: Options,
        target: Target,
        ranks: Ranks,
        saver: Saves,
        image: RankImage | None,
        peers: Peers | None = None,
        host: HostFiles | None = None,
    ) -> None:
        self._options = options
        self._target = target
        self._ranks = ranks
        self._saver = saver
        self._image, self._peers, self._host = image, peers, host
        self._priority = _priority_rows(options, target, ranks)
        self._is_first = True
        self._is_begun = self._is_swept = False
        """True once images were begun, on all ranks alike; some may have given theirs up since."""
        self._recovered: int | None = None  # the step that images have brought the model to
        self.reasons: tuple[str, ...] = ()
        self.half_way = False

    @property
    def root(self) -> Folder:
        """Return the root of the checkpoints, as a restore reads it."""
        return self._options.root if self._host is None else self._host.readable

    def recover(self) -> Recovered | None:
        """Bring the model to the newest step that all images can reach; a collective.

        Only the first restore of a process does so: later ones are wishes to go back.

        Returns:
            None: images can't be used, and nothing was changed that an ordinary restore does not
            write again; ``reasons`` tells why.

        Raises:
            ModelPartlyRestored: recovering failed half-way, and there is no checkpoint.
            ClaimDamaged, StorageFailed: the newest checkpoint is unknown; nothing was changed.
        """
        image, self.reasons = self._image, ()
        if image is None or not self._is_first:
            return None
        settle_buckets(self._options.model)
        found = self._ranks.on_all_ranks(image.look)
        expect(self._options.root, {head for each in found for head in each.heads if head})
        decision, chain, passed_over = self._ranks.from_rank_0(
            lambda: decide_by_storage(found, self._options)
        )
        self._is_first = False  # not earlier: storage that fails may be asked again
        if decision.step is None:
            self._tell(decision.reasons)
            return None
        restore = HeldRestore(self._target)
        from_peers: tuple[int, ...] = ()
        try:
            with restore.optimizers.fitted():
                from_peers = self._go_back(image, restore, decision, chain, passed_over)
        except Exception as error:
            # If a rank has died, its death is the error: this call raises it again, and the images
            # stay as they are for the next start. Else all ranks are here with the same error.
            self.half_way = any(self._ranks.gather(restore.began))
            self._tell((f"going back failed: {error}",))
            self.overwriting()
            if self.half_way and chain is None:
                raise ModelPartlyRestored(
                    f"going back to step {decision.step} by images failed half-way, and there is "
                    f"no checkpoint: start again from a new model ({error!r})"
                ) from error
            return None
        except BaseException:  # an interrupt, of this rank alone
            self.half_way = restore.began
            raise
        return Recovered(
            decision.step,
            chain,
            tuple(passed_over),
            decision.lost,
            from_peers,
            decision.losses,
            self._ranks.world_size,
        )

    def _go_back(
        self,
        image: RankImage,
        restore: HeldRestore,
        decision: Decision,
        chain: Chain | None,
        passed_over: Sequence[str],
    ) -> tuple[int, ...]:
        """Bring all ranks to the step; return those that have read a peer's copy."""
        assert decision.step is not None
        # An image knows the checkpoint that its rank saved, not a copy made of it since.
        step, head = decision.step, None if chain is None else original_of(chain.head)
        own: Side = image
        from_peers: tuple[int, ...] = ()
        if decision.lost:
            assert chain is not None, "the lost ranks' rows are there"
            lost = self._lost_rank(image, decision, chain)
            own = meet(self._ranks, image, lost, decision)
            has_copy = lost is not None and lost.has_copy
            from_peers = tuple(r for r, has in enumerate(self._ranks.gather(has_copy)) if has)
        # Up to here nothing is changed but the optimizers' state, which ``fitted`` puts back.
        restore.share(self._ranks, self._ranks.on_all_ranks(lambda: restore.read(own.held(step))))
        self._ranks.on_all_ranks(restore.plan)
        restore.began = True
        known = self._ranks.on_all_ranks(lambda: own.known_lineage)
        lineage = next(each for rank, (each, *_) in enumerate(known) if rank not in decision.lost)
        # A rank that was lost in an earlier recovery may know more than the others.
        lossy, full = max(each[1] for each in known), any(each[2] for each in known)
        lossy += int(decision.is_new and chain is not None and chain.lossy)
        self._ranks.on_all_ranks(lambda: own.go_back(step, head, decision.losses, lossy))
        self._ranks.on_all_ranks(restore.load)
        restore.hand_back(self._ranks)
        self._saver.recovered(chain, lineage, lossy, full, decision.losses, passed_over)
        self._ranks.on_all_ranks(restore.set_generators)
        # All ranks are at the step: only now may the way back be forgotten.
        self._ranks.on_all_ranks(lambda: own.resume(step))
        self._is_begun, self._recovered = True, step
        if self._peers is not None:
            self._peers.folder.forget_fetched()
        if self._priority is not None:
            self._priority.restart(step)
        return from_peers

    def _lost_rank(self, image: RankImage, decision: Decision, chain: Chain) -> LostRank | None:
        """Return this rank's side if it is lost, else None; a collective."""
        fetched = () if self._peers is None else self._peers.fetch(chain, decision.lost)
        rank = self._ranks.rank
        if rank not in decision.lost:
            return None
        assert decision.step is not None
        copies = self._peers.fetched if self._peers is not None and rank in fetched else None
        return LostRank(
            self._options,
            self._target,
            self._ranks,
            image,
            self._saver.lineage,
            chain,
            decision.step,
            copies,
        )

    def overwriting(self) -> None:
        """Stop using images, on all ranks: their memory is about to be overwritten."""
        self._is_begun, self._recovered = False, None
        if self._image is not None:
            self._image.unready()

    def begin(self, step: int, at_start: bool = False) -> None:
        """Begin images of the model as it is at the end of a step; a collective.

        Put off where gradients wait on any rank, or a checkpoint is on its way; and, at the start,
        where a state object may not be asked before training goes on.

        Raises:
            ImagesRefused: they can't be had on some rank.
        """
        image, is_first, self._is_first = self._image, self._is_first, False
        if image is None:
            return
        if is_first:
            settle_buckets(self._options.model)
            if step > 0 and self._ranks.world_size > 2:
                self._saver.log(
                    "training began before restore() was called: after a restart gradients may be "
                    "summed in another order, and the run is not the same bit for bit",
                    level=logging.WARNING,
                )
        busy = self._saver.running is not None or self._saver.publishing()
        busy = busy or self._saver.gradients_wait
        busy = busy or (at_start and any(map(holds_loader, self._options.states.values())))
        facts = self._ranks.gather((busy, image.is_broken))
        if any(is_broken for _, is_broken in facts):
            image.give_up("another rank has none")  # on all ranks, lest some ask again and wait
            return
        if any(is_busy for is_busy, _ in facts):
            return
        incarnation = self._ranks.from_rank_0(lambda: secrets.token_hex(16))
        lineage = self._saver.lineage
        head = None if lineage.previous is None else lineage.previous.id
        name, lossy, full = lineage.id, lineage.lossy_restores, lineage.converted
        begin = partial(image.begin, step, incarnation, name, head, lossy, full, lineage.losses)
        try:
            self._ranks.on_all_ranks(begin)
        except BaseException:
            image.unready()
            raise
        if self._priority is not None:
            self._priority.restart(step)
        self._is_begun = True

    def end_step(self, step: int) -> None:
        """End a step in the image, unless gradients wait, or begin images if there are none."""
        image = self._image
        if image is None:
            return
        if not self._is_begun:
            self.begin(step)  # a collective, which a rank without an image any more takes part in
            return
        if not self._is_swept and self._saver.claimed:  # not before: a live run may need them
            self._is_swept = True
            self._sweep(image)
        if not self._saver.gradients_wait:
            image.end_step(step)
            if self._priority is not None and self._saver.claimed and not image.is_broken:
                previous = self._saver.lineage.previous
                head = None if previous is None else previous.id
                self._priority.step(step, head, image.incarnation)

    def before_save(self) -> None:
        """Look whether a checkpoint that is not begun at a step's end would be newer than that."""
        if self._image is not None:
            self._image.before_save()

    def missed(self, why: str) -> None:
        """Note that rows were changed that were not journaled."""
        if self._image is not None:
            self._image.missed(why)

    def close(self, over: bool) -> None:
        """Stop using images and copies.

        Args:
            over: the run is over; else other processes may go on from them.
        """
        if over and self._has_steps_of_another():
            over = False
            self._saver.log(
                "this process has not gone on with the run: its images stay, since no checkpoint "
                "holds their steps up to %d. A restart of the run goes on from them; save() before "
                "close() makes them superfluous",
                self._recovered,
                level=logging.WARNING,
            )
        if self._image is not None:
            self._image.close(remove=over)
        if self._priority is not None:
            self._priority.close(over and self._saver.claimed)
        if self._host is not None:
            self._host.close(over and self._saver.claimed)
        if self._peers is not None and over:
            self._peers.folder.remove()

    def _has_steps_of_another(self) -> bool:
        """Return whether images hold steps of a killed run that no checkpoint holds, and this
        process has not trained on: an evaluation leaves them for the run's restart.
        """
        if self._saver.claimed or self._recovered is None:
            return False
        previous = self._saver.lineage.previous
        return previous is None or previous.step < self._recovered

    def _tell(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        nothing = all("there is none" in reason for reason in reasons)
        level = logging.INFO if nothing else logging.WARNING
        self._saver.log("images are not used: %s", "; ".join(reasons), level=level)

    def _sweep(self, image: RankImage) -> None:
        assert self._options.survive is not None
        hours = self._options.survive.keep_hours
        try:
            images = sweep(image.path, self._ranks.world_size, hours)
            for line in (*images, *CopiesFolder(image.path).sweep(hours)):
                logger.info("%s", line)
        except OSError as error:  # no reason for one rank to end alone
            logger.warning("images that are over may stay in %s: %s", image.path.parent, error)
