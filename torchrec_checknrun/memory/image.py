"""Hold one rank's image: begin it, end each step in it, and go back to a step after a restart.

The order of stores is what makes it right. A step's state is written to the older of two places,
then the step is published as done; T is the newest step that is done on all ranks, and its state is
not overwritten before all have published it. Rows are journaled before they change, and put back,
as often as it takes, until all ranks are at T; only then are journals dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.errors import CheckNRunError, ImagesRefused
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.memory.agreement import Found
from torchrec_checknrun.memory.descent import INTERVALS, KeptDescent
from torchrec_checknrun.memory.held_states import HeldStates, Taker, require_few
from torchrec_checknrun.memory.images import Images
from torchrec_checknrun.memory.shard_memory import ShardMemory
from torchrec_checknrun.memory.step_journal import FIRST_SIZE, StepJournal
from torchrec_checknrun.memory.step_states import StepStates
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.shared_memory.areas import Areas, Layout
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import FIRST_BYTES, Piece, Word
from torchrec_checknrun.shared_memory.space import bytes_at, require_space

logger = logging.getLogger(__name__)

_DAMAGED = (NoImage, ValueError, RuntimeError, IndexError, OSError)
"""Errors met while an image is read that anybody may have written."""


class RankImage:
    """The image of one rank.

    Args:
        images: what the user wants.
        root: the URL of the run's checkpoints, which names the run.
        rank, world_size: of this process.
        states: the state objects by name.

    Attributes:
        path: of the file.
        why_not: why an earlier process's image can't be used; None: it can.
        rows, changed: rows put back by the last roll-back, and how many had changed.
        shards: the shards whose memory lies in the image.

    Raises:
        ImagesRefused: this model or this machine can't have images.
    """

    def __init__(
        self,
        images: Images,
        root: str,
        rank: int,
        world_size: int,
        model: nn.Module,
        tracked: TrackedModel,
        states: Mapping[str, Stateful],
    ) -> None:
        self._images = images
        self._model, self._tracked = model, tracked
        self._taker = Taker(model, tracked, states)
        self.shards = ShardMemory(tracked)
        self._marks = [shard.marks for shard in self.shards.shards]
        self._run = f"{root!a} {rank}/{world_size}"
        self.path = images.path(root, rank, world_size)
        self.why_not: str | None = None
        self.rows = self.changed = 0
        self._areas: Areas | None = None
        self._journal: StepJournal | None = None
        self._broken = False
        self._open()

    def _open(self) -> None:
        """Open what an earlier process has left, or make sure that there is room."""
        try:
            self._areas = Areas.open(self.path, self._run, self.shards.digest)
            self._descent = KeptDescent.open(self._areas, self._marks)
            return
        except _DAMAGED as error:
            self.why_not = str(error)
        self._areas = None
        if "alive" in self.why_not:
            raise ImagesRefused(
                f"the image {self.path} can't be used: {self.why_not}. Two runs must not share a "
                "root; end the other one first"
            )
        needed = (
            self.shards.bytes + KeptDescent.bytes_for(self._marks) + FIRST_BYTES + 4 * FIRST_SIZE
        )
        # A storage is given back once it is copied.
        given_back = self.shards.bytes - self.shards.largest
        require_space(self.path.parent, needed - bytes_at(self.path), given_back)

    # ------------------------------------------------------------------ recovery

    def look(self) -> Found:
        """Tell what the image that an earlier process has left can do."""
        try:
            return self._look()
        except _DAMAGED as error:
            self.why_not = str(error)
        return Found(missing=f"{self.path}: {self.why_not}", holds_rows=self._holds_rows)

    @property
    def _holds_rows(self) -> bool:
        return any(shard.local.rectangle.rows for shard in self.shards.shards)

    def _look(self) -> Found:
        if self._areas is None or self.why_not is not None:
            raise NoImage(self.why_not)
        words = self._areas.words
        done, floor = words[Word.DONE], words[Word.FLOOR]
        self._make_journal(self._areas).verify()
        steps = tuple(s for s in StepStates(self._areas).steps if floor <= s <= done)
        if (goal := words[Word.GOAL] - 1) >= 0:
            done, steps = goal, tuple(step for step in steps if step == goal)
        return Found(
            incarnation=self._areas.layout.incarnation,
            done=done,
            steps=steps,
            heads=self._descent.heads,
            ahead=self._descent.ahead,
            holds_rows=self._holds_rows,
            losses=self._descent.known.losses,
        )

    def held(self, step: int) -> HeldStates:
        """Return everything beside rows as of a step.

        Raises:
            NoImage: it is damaged.
        """
        return HeldStates.read(self.state_bytes(step))

    def state_bytes(self, step: int) -> memoryview:
        """Return what ``HeldStates.read`` takes, as of a step; shared memory.

        Raises:
            NoImage: it is damaged.
        """
        assert self._areas is not None
        return StepStates(self._areas).read(step)

    def go_back(
        self,
        step: int,
        head: str | None,
        losses: tuple[Loss, ...] = (),
        lossy: int | None = None,
    ) -> None:
        """Move the model's shards into the image, with its content as of the end of a step.

        From here on the image is good for that step only: a recovery that is killed half-way must
        not be followed by one to a later step, which may be possible once other images are gone.

        Args:
            head: the checkpoint that all ranks take for the newest one.
            losses: what partial recoveries have cost so far, this one included.
            lossy: the restores from lossy checkpoints so far, on any rank; None: as it knows.

        Raises:
            NoImage, ValueError: the image is damaged; the shards have unknown content.
        """
        assert self._areas is not None
        self._areas.words.publish(Word.GOAL, step + 1)
        for shard in self.shards.shards:
            shard.mark_all(everywhere=True)
        self._tracked.restores += 1
        self.shards.move(self._areas, keep=True)
        journal = self._make_journal(self._areas)
        journal.undo_to(step)
        self.rows, self.changed = journal.rows, journal.changed
        self._descent.recover(head, losses, lossy)
        self._journal = journal
        self._states = StepStates(self._areas)

    def resume(self, step: int) -> None:
        """Publish the step that all ranks are at now, and go on from there."""
        assert self._areas is not None
        assert self._journal is not None
        self._areas.words.publish(Word.DONE, step)
        self._journal.drop()
        self._areas.words.publish(Word.GOAL, 0)
        self._watch()

    # ------------------------------------------------------------------ training

    @property
    def is_broken(self) -> bool:
        """Return whether there is no image any more, of which the log tells."""
        return self._broken

    def unready(self) -> None:
        """Stop using the image, before its memory is overwritten; ``begin`` begins anew."""
        if self._areas is not None:
            self._areas.words.publish(Word.READY, 0)
        self._unwatch()
        self._journal = None

    def begin(
        self,
        step: int,
        incarnation: str,
        lineage: str,
        head: str | None,
        lossy: int,
        full: bool,
        losses: tuple[Loss, ...] = (),
        state: Sequence[Piece] | None = None,
    ) -> None:
        """Begin an image of the model as it is now, at the end of a step.

        Args:
            state: everything beside rows; None: ask the objects, on all ranks.
            incarnation: the same on all ranks.
            lineage, head, lossy, full, losses: see ``Descent``.

        Raises:
            ImagesRefused: there is too little memory, or too much state.
            UnsupportedState, SaveFailed: a state can't be stored.
        """
        started = time.perf_counter()
        pieces = self._taker.take() if state is None else state
        require_few(pieces, self._images.most_state_bytes, time.perf_counter() - started)
        if self._areas is not None and self.why_not is not None:
            self._areas.close()
            self._areas = None
        if self._areas is None:
            self._areas = Areas.create(self.path, Layout(self._run, self.shards.digest, "", {}))
        areas = self._areas
        self.why_not = None
        self.unready()
        StepJournal.clear(areas)
        self._states = StepStates(areas)
        self._states.clear(pieces)
        self.shards.move(areas, keep=False)
        size = KeptDescent.bytes_for(self._marks)
        memory = areas.get(INTERVALS) if areas.has(INTERVALS) else areas.add(INTERVALS, size)
        self._descent = KeptDescent(areas.descent, memory, self._marks)
        self._descent.start(lineage, head, lossy, full, losses)
        self._states.write(step, pieces)
        areas.words.publish(Word.GOAL, 0)
        # A fresh start is not gone back to: the program loads pretrained layers, say, after it.
        fresh = head is None and step == 0
        areas.words.publish(Word.FLOOR, step + fresh)
        areas.words.publish(Word.DONE, step)
        areas.words.publish(Word.TIME, int(time.time()))
        areas.publish(incarnation)
        self._journal = self._make_journal(areas)
        self._journal.begin_step()
        self._watch()
        areas.words.publish(Word.READY, 1)

    def end_step(self, step: int) -> None:
        """Put everything beside rows into the image and publish the step as done.

        Where that fails the image is given up, and the log tells why; training goes on.
        """
        if self._areas is None or self._journal is None:
            self._ask_alike()
            return
        for watch in self.shards.watches:
            watch.check()
        started = time.perf_counter()
        try:
            pieces = self._taker.take()
            require_few(pieces, self._images.most_state_bytes, time.perf_counter() - started)
            if not self.shards.is_in_place:
                raise NoImage("the tables' memory was replaced (by a reshard, or `model.to`)")
            words = self._areas.words
            self._states.write(step, pieces, keep=words[Word.DONE])
        except (CheckNRunError, OSError, NoImage) as error:
            self.give_up(str(error))
            return
        words.publish(Word.DONE, step)
        words.publish(Word.TIME, int(time.time()))
        self._journal.end_step()

    def missed(self, why: str) -> None:
        """Note that rows were changed that were not journaled."""
        if self._journal is not None:
            self._journal.missed(why)

    # ------------------------------------------------------------------ checkpoints

    def before_save(self) -> None:
        """Note whether a checkpoint may hold more than the end of the last step, which must not be
        gone back to then once the checkpoint is committed.
        """
        if self._journal is None or self._areas is None:
            self._ask_alike()
            return
        try:
            done = self._areas.words[Word.DONE]
        except NoImage as error:
            self.give_up(str(error))
            return
        is_at = self._is_at(done)  # first: it asks the objects, on all ranks alike
        if self._journal.is_open or not is_at:
            self._descent.ahead_of = done

    def cut(self, id: str, full: bool) -> None:
        """Note a checkpoint whose marks are about to be cut."""
        if self._areas is None or self._journal is None:
            return
        if self._descent.clock.full:
            self._areas.words.publish(Word.READY, 0)
            self._descent.renumber()
            self._areas.words.publish(Word.READY, 1)
        self._descent.begin(id, full)

    def committed(self, id: str, lineage: str, lossy: int) -> None:
        """Note that a checkpoint is committed."""
        if self._journal is not None:
            self._descent.committed(id, lineage, lossy)

    def require_full(self) -> None:
        """Note that the next checkpoint must be full."""
        if self._journal is not None:
            self._descent.require_full()

    @property
    def incarnation(self) -> str:
        """Return the name of the images that were begun together with this one."""
        assert self._areas is not None
        return self._areas.layout.incarnation

    @property
    def known_lineage(self) -> tuple[str, int, bool]:
        """Return the lineage's name, the lossy restores, and whether the next checkpoint must be
        full.
        """
        known = self._descent.known
        return known.lineage, known.lossy_restores, known.must_be_full

    def close(self, remove: bool) -> None:
        """Stop using the image.

        Args:
            remove: the run is over; else a later process may go on from it.
        """
        self._unwatch()
        self._journal = None
        if self._areas is not None:
            if remove:
                self._areas.remove()
            else:
                self._areas.leave()
            self._areas = None

    # ------------------------------------------------------------------

    def _is_at(self, step: int) -> bool:
        """Tell whether everything beside the tables in the image is as at the end of a step."""
        try:
            return self._taker.is_present(self.state_bytes(step))
        except (NoImage, CheckNRunError):
            return False

    def _ask_alike(self) -> None:
        """Ask the objects at the end of a step without an image, as ranks that have theirs do."""
        if self._broken:
            self._taker.ask()

    def give_up(self, why: str) -> None:
        """Have no image any more; say so, once."""
        self.unready()
        if self._broken:
            return
        self._broken = True
        logger.warning(
            "there is no image from this step on, so that a killed process means a restore from "
            "the newest checkpoint: %s",
            why,
        )

    def _make_journal(self, areas: Areas) -> StepJournal:
        shards = [shard.local for shard in self.shards.shards]
        return StepJournal(areas, shards, self._descent.kept, self._descent.clock)

    def _watch(self) -> None:
        assert self._journal is not None
        self.shards.watch(self._journal, self._images.most_state_bytes)
        self.shards.watch_loads(self._model, lambda: self.missed("load_state_dict writes to them"))
        for marks, kept in zip(self._marks, self._descent.kept, strict=True):
            marks.kept = kept

    def _unwatch(self) -> None:
        self.shards.unwatch()
        for marks in self._marks:
            marks.kept = None
