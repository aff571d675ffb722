"""Keep images of a run while it trains, and go on from them when its processes have died.

Every decision is one answer for all ranks. Where images can't be used the reason is told, and the
caller restores from the storage.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from functools import partial

from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.memory.agreement import Decision, Found, Newest, decide
from torchrec_checknrun.memory.gradient_buckets import settle_buckets
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.sweep import sweep
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.restore import Target
from torchrec_checknrun.root.chain import Chain, newest
from torchrec_checknrun.run.held_restore import HeldRestore
from torchrec_checknrun.run.options import Options
from torchrec_checknrun.run.saver import Saver

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


@dataclass(frozen=True)
class Recovered:
    """What images have brought back, the same on all ranks.

    Attributes:
        step: whose end the model is at.
        chain: the newest checkpoint's, from which the model descends; None without one.
        passed_over: newer checkpoints that could not be used, with the reasons.
    """

    step: int
    chain: Chain | None
    passed_over: tuple[str, ...]


def make_image(options: Options, target: Target, ranks: Ranks) -> RankImage | None:
    """Open or prepare this rank's image; None if none is wanted.

    Raises:
        ImagesRefused: the model or the machine can't have images.
    """
    if options.survive is None:
        return None
    return RankImage(
        options.survive,
        options.root.url,
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


class Survival:
    """The images of all ranks, as the training thread of one sees them.

    Args:
        image: this rank's; None: the run has none.

    Attributes:
        reasons: why images were not used at the last try.
    """

    def __init__(
        self,
        options: Options,
        target: Target,
        ranks: Ranks,
        saver: Saver,
        image: RankImage | None,
    ) -> None:
        self._options = options
        self._target = target
        self._ranks = ranks
        self._saver = saver
        self._image = image
        self._is_first = True
        self._is_begun = False
        """Whether images were begun, on all ranks alike; some may have given theirs up since."""
        self.reasons: tuple[str, ...] = ()

    def recover(self) -> Recovered | None:
        """Bring the model to the newest step that all images can reach; a collective.

        Only the first restore of a process does so: later ones are wishes to go back.

        Returns:
            None: images can't be used, and nothing was changed that an ordinary restore does not
            write again; ``reasons`` tells why.

        Raises:
            ModelPartlyRestored: recovering failed half-way, and there is no checkpoint.
        """
        image, self.reasons = self._image, ()
        if image is None or not self._is_first:
            return None
        self._is_first = False
        self._settle_buckets()
        found = self._ranks.on_all_ranks(image.look)
        decision, chain, passed_over = self._ranks.from_rank_0(lambda: self._decide(found))
        if decision.step is None:
            self._tell(decision.reasons)
            return None
        restore = HeldRestore(self._target)
        try:
            with restore.optimizers.fitted():
                self._go_back(image, restore, decision.step, chain)
        except Exception as error:
            # If a rank has died, its death is the error: this call raises it again, and the images
            # stay as they are for the next start. Else all ranks are here with the same error.
            changed = any(self._ranks.gather(restore.began))
            self._tell((f"going back failed: {error}",))
            self.overwriting()
            if changed and chain is None:
                raise ModelPartlyRestored(
                    f"going back to step {decision.step} by images failed half-way, and there is "
                    f"no checkpoint: start again from a new model ({error!r})"
                ) from error
            return None
        return Recovered(decision.step, chain, tuple(passed_over))

    def _go_back(
        self, image: RankImage, restore: HeldRestore, step: int, chain: Chain | None
    ) -> None:
        head = None if chain is None else chain.head.id
        # Up to here nothing is changed but the optimizers' state, which ``fitted`` puts back.
        self._ranks.on_all_ranks(lambda: restore.plan(image.held(step)))
        restore.began = True
        self._ranks.on_all_ranks(lambda: image.go_back(step, head))
        self._ranks.on_all_ranks(restore.load)
        restore.hand_back(self._ranks)
        lineage, lossy, full = self._ranks.from_rank_0(lambda: image.known_lineage)
        self._saver.recovered(chain, lineage, lossy, full)
        self._ranks.on_all_ranks(restore.set_generators)
        # All ranks are at the step: only now may the way back be forgotten.
        self._ranks.on_all_ranks(lambda: image.resume(step))
        self._is_begun = True
        self._sweep(image)

    def overwriting(self) -> None:
        """Stop using images, on all ranks: their memory is about to be overwritten."""
        self._is_begun = False
        if self._image is not None:
            self._image.unready()

    def begin(self, step: int) -> None:
        """Begin images of the model as it is at the end of a step; a collective.

        Put off where gradients wait on any rank, or a checkpoint is on its way.

        Raises:
            ImagesRefused: they can't be had on some rank.
        """
        image, is_first, self._is_first = self._image, self._is_first, False
        if image is None:
            return
        if is_first:
            self._settle_buckets()
            if step > 0 and self._ranks.world_size > 2:
                self._saver.log(
                    "training began before restore() was called: after a restart gradients may be "
                    "summed in another order, and the run is not the same bit for bit",
                    level=logging.WARNING,
                )
        busy = self._saver.gradients_wait or self._saver.running is not None
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
        begin = partial(image.begin, step, incarnation, name, head, lossy, full)
        try:
            self._ranks.on_all_ranks(begin)
        except BaseException:
            image.unready()
            raise
        self._is_begun = True
        self._sweep(image)

    def end_step(self, step: int) -> None:
        """End a step in the image, unless gradients wait, or begin images if there are none."""
        image = self._image
        if image is None:
            return
        if not self._is_begun:
            self.begin(step)  # a collective, which a rank without an image any more takes part in
        elif not self._saver.gradients_wait:
            image.end_step(step)

    def before_save(self) -> None:
        """Look whether a checkpoint that is not begun at a step's end would be newer than that."""
        if self._image is not None:
            self._image.before_save()

    def missed(self, why: str) -> None:
        """Note that rows were changed that were not journaled."""
        if self._image is not None:
            self._image.missed(why)

    def close(self, over: bool) -> None:
        """Stop using images.

        Args:
            over: the run is over; else other processes may go on from them.
        """
        if self._image is not None:
            self._image.close(remove=over)

    def _settle_buckets(self) -> None:
        if self._ranks.world_size > 2:  # of two, any order has one sum
            settle_buckets(self._options.model)

    def _decide(self, found: list[Found]) -> tuple[Decision, Chain | None, list[str]]:
        if any(image.missing is not None for image in found):
            return decide(found, Newest()), None, []  # the storage need not be asked
        chain, problems = newest(self._options.root)
        if chain is None and problems:
            reason = f"the storage holds no whole checkpoint: {'; '.join(problems)}"
            return Decision(None, (reason,)), None, problems
        head = Newest() if chain is None else Newest(chain.head.id, chain.head.step)
        return decide(found, head), chain, problems

    def _tell(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        nothing = all("there is none" in reason for reason in reasons)
        self._saver.log(
            "images are not used: %s",
            "; ".join(reasons),
            level=logging.INFO if nothing else logging.WARNING,
        )

    def _sweep(self, image: RankImage) -> None:
        assert self._options.survive is not None
        for line in sweep(image.path, self._ranks.world_size, self._options.survive.keep_hours):
            logger.info("%s", line)
