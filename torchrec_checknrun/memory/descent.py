"""Keep what a rank knows of its checkpoints in its image, and its marks in terms of their cuts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.marks.intervals import FIRST, IntervalClock, KeptMarks
from torchrec_checknrun.marks.layers import Consumer
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.shared_memory.areas import Areas, Attempt, Descent
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import Record

INTERVALS = "intervals"
"""The area of an image that holds rows' intervals."""

_MOST_ATTEMPTS = 64


class KeptDescent:
    """A rank's checkpoints and marks, as its image holds them.

    Args:
        record: in the image.
        memory: for the intervals of all shards' rows, ``(size,)`` uint8.
        marks: of the shards, in their order.

    Attributes:
        clock: tells the present interval.
        kept: by shard.
        known: as last written or read.
        ahead_of: the last step at a save that was not begun as it ended, but may hold more.
    """

    known: Descent

    def __init__(self, record: Record, memory: torch.Tensor, marks: Sequence[Marks]) -> None:
        self._record = record
        self._marks = marks
        self.clock = IntervalClock()
        self.ahead_of = -1
        sizes = [each.rows + 1 for each in marks]
        self.kept = [KeptMarks(part, self.clock) for part in memory[: sum(sizes)].split(sizes)]

    @staticmethod
    def bytes_for(marks: Sequence[Marks]) -> int:
        """Return the bytes that the intervals of shards take."""
        return sum(each.rows + 1 for each in marks)

    @classmethod
    def open(cls, areas: Areas, marks: Sequence[Marks]) -> KeptDescent:
        """Read what an earlier process has left in an image.

        Raises:
            NoImage: it is damaged.
        """
        memory = areas.get(INTERVALS)
        if len(memory) < cls.bytes_for(marks):
            raise NoImage("its marks are too few")
        descent = cls(areas.descent, memory, marks)
        descent.read()
        return descent

    def start(
        self,
        lineage: str,
        head: str | None,
        lossy: int,
        must_be_full: bool,
        losses: tuple[Loss, ...] = (),
    ) -> None:
        """Begin with the shards' present marks, of which no checkpoint holds any."""
        self.clock.interval = FIRST
        for kept, marks in zip(self.kept, self._marks, strict=True):
            since_last = marks.modified(Consumer.LAST)
            kept.start(marks.modified(Consumer.BASELINE) | since_last, since_last)
        self._write(Descent(lineage, head, 1, 0, FIRST, (), lossy, must_be_full, losses))

    def read(self) -> None:
        """Read what an earlier process has left.

        Raises:
            NoImage: it is damaged.
        """
        self.known = self._record.read()
        self.clock.interval = self.known.interval

    def recover(
        self, head: str | None, losses: tuple[Loss, ...] = (), lossy: int | None = None
    ) -> None:
        """Give the shards their marks as of the agreed newest checkpoint, one of ``heads``.

        What was begun since and is not committed counts as if it had not been begun.

        Args:
            losses: what partial recoveries have cost, this one included.
            lossy: the restores from lossy checkpoints, those of other ranks included; None: as
                known.
        """
        known = self.known
        for attempt in known.attempts:
            if attempt.id == head:
                known = _committed(known, attempt)
        for kept, marks in zip(self.kept, self._marks, strict=True):
            marks.mark_all()
            marks.clear(Consumer.LAST | Consumer.BASELINE)
            cuts = {Consumer.LAST: known.last, Consumer.BASELINE: known.baseline}
            for consumer, since in cuts.items():
                modified = (kept.rows > since).view(torch.uint8)
                marks.live.bitwise_or_(modified.mul_(int(consumer)))
        lossy = known.lossy_restores if lossy is None else lossy
        # In one record: a recovery that is killed and repeated counts neither of them twice.
        self._write(
            msgspec.structs.replace(known, attempts=(), losses=losses, lossy_restores=lossy)
        )

    @property
    def heads(self) -> tuple[str | None, ...]:
        """Return the checkpoints that the image may descend from."""
        return (self.known.head, *(attempt.id for attempt in self.known.attempts))

    @property
    def ahead(self) -> tuple[tuple[str | None, int], ...]:
        """Return ``heads``, each with the last step that it may hold more than the end of."""
        known = self.known
        attempts = ((attempt.id, attempt.ahead_of) for attempt in known.attempts)
        return ((known.head, known.ahead_of), *attempts)

    def begin(self, id: str, full: bool) -> None:
        """Note a checkpoint that is about to be cut: from now on rows change in a new interval."""
        known = self.known
        attempt = Attempt(id, known.interval, full, self.ahead_of)
        attempts = (*known.attempts, attempt)[-_MOST_ATTEMPTS:]
        interval = known.interval + 1
        self._write(msgspec.structs.replace(known, attempts=attempts, interval=interval))
        self.clock.interval = interval

    def committed(self, id: str, lineage: str, lossy: int) -> None:
        """Note that a checkpoint is committed."""
        for attempt in self.known.attempts:
            if attempt.id == id:
                known = _committed(self.known, attempt)
                self._write(
                    msgspec.structs.replace(
                        known, lineage=lineage, lossy_restores=lossy, must_be_full=False
                    )
                )
                return

    def require_full(self) -> None:
        """Note that the next checkpoint must be full."""
        if not self.known.must_be_full:
            self._write(msgspec.structs.replace(self.known, must_be_full=True))

    def renumber(self) -> None:
        """Give numbers of intervals back; the image is not to be read meanwhile.

        Checkpoints begun and not known to be committed are forgotten with their intervals.
        """
        known = self.known
        for kept in self.kept:
            kept.renumber(known.baseline, known.last)
        self._write(msgspec.structs.replace(known, attempts=(), baseline=0, last=1, interval=FIRST))
        self.clock.interval = FIRST

    def _write(self, known: Descent) -> None:
        self._record.write(known)
        self.known = known


def _committed(known: Descent, attempt: Attempt) -> Descent:
    return msgspec.structs.replace(
        known,
        head=attempt.id,
        last=attempt.interval,
        baseline=attempt.interval if attempt.full else known.baseline,
        attempts=(),
        ahead_of=attempt.ahead_of,
    )
