"""Asks the triggers after every step, and has one answer on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.run.appointments import Appointments
from torchrec_checknrun.run.preemption import Preemption
from torchrec_checknrun.run.triggers import AtEnd, Moment, OnSigterm, Trigger

_SAVE = "save"
_END = "end"


class Schedule:
    """When checkpoints are due. Made on all ranks at once, with equal triggers.

    Without a trigger that only rank 0 can answer, asking costs no communication; with one, each
    other rank looks into the store once per step.

    Attributes:
        at_end: whether a checkpoint is due when the checkpointer is closed.
        ending: whether the checkpoint that is due is the last: save it, wait for it no longer than
            ``remaining_seconds``, then ``end``. The same on all ranks; stays until then.
    """

    def __init__(
        self,
        triggers: Sequence[Trigger],
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.at_end = any(isinstance(trigger, AtEnd) for trigger in triggers)
        self.ending = False
        self._by_step = [trigger for trigger in triggers if trigger.by_step]
        self._asked = [trigger for trigger in triggers if not trigger.by_step]
        self._is_rank_0 = ranks.rank == 0
        self._clock = clock
        self._begun = clock()
        self._wanted = False
        self._appointments: Appointments | None = None
        self._preemption: Preemption | None = None
        grace = [t.grace_seconds for t in triggers if isinstance(t, OnSigterm)]
        if (self._asked or grace) and (store := ranks.store()) is not None:
            self._appointments = Appointments(store, ranks.rank, ranks.world_size)
        if grace:
            self._preemption = Preemption(ranks.store(), ranks.world_size, min(grace))

    @property
    def remaining_seconds(self) -> float:
        """Until the process ends by itself: the grace time after a SIGTERM; infinite before."""
        return self._preemption.remaining_seconds if self._preemption else math.inf

    def due(self, step: int) -> bool:
        """Whether to begin a checkpoint after this step: the same answer on all ranks.

        To be called on all ranks after each step.

        Raises:
            StoreUnreachable: the ranks can't agree any more.
        """
        now = Moment(step, self._clock() - self._begun)
        at_step = [trigger.due(now) for trigger in self._by_step]
        word = self._agreed(now)
        self.ending = self.ending or word == _END
        return any(at_step) or word is not None or self.ending

    def saved(self) -> None:
        """A checkpoint was begun, for whatever reason: seconds count from now."""
        self._begun = self._clock()
        self._wanted = False

    def end(self) -> None:
        """Ends the process as SIGTERM would have, when ``ending`` and saved (or not).

        Raises:
            SystemExit: there was no Python handler for SIGTERM, which would have been run instead.
        """
        preemption, self._preemption = self._preemption, None
        assert preemption is not None
        self.ending = False
        preemption.end()

    def close(self, failed: bool = False) -> None:
        """Gives SIGTERM back; if one has come meanwhile, ends the process as ``end`` does.

        Args:
            failed: an exception is on its way out, and the other ranks may not come.

        Raises:
            SystemExit: as ``end``.
        """
        if self._appointments is not None:
            self._appointments.close()
        if self._preemption is not None:
            self._preemption.close(failed)

    def _agreed(self, now: Moment) -> str | None:
        heard = self._preemption is not None and self._preemption.heard
        if not self._asked and not heard:
            return None
        wish = self._wish(now) if self._is_rank_0 else None
        if self._appointments is None:
            return wish
        return self._appointments.agreed(now.step, wish, urgent=wish == _END)

    def _wish(self, now: Moment) -> str | None:
        if self._preemption is not None and self._preemption.all_here:
            return _END
        answers = [trigger.due(now) for trigger in self._asked]
        self._wanted = self._wanted or any(answers)
        return _SAVE if self._wanted else None
