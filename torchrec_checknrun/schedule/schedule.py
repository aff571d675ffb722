"""Ask the triggers after every step, and give the same answer on all ranks.

Triggers that follow from the step alone answer alike on every rank. Where only rank 0 can answer (a
clock, a signal), the ranks agree on a step to act at through the store, without a collective in any
step: rank 0 announces a step a little ahead; the others look once per step, and acknowledge it. At
that step rank 0 writes ``save`` or ``end`` if all have, and the others wait for its word. No rank
can act alone: the word is written once, by whichever rank comes first, and a rank that sees the
announcement too late, or has waited too long, writes that it is off. Then rank 0 announces another
step, further ahead. When a restore takes all ranks back to before the announcement, rank 0 writes
that it is off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch.distributed import DistError, Store

from torchrec_checknrun.errors import StoreUnreachable
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.schedule.preemption import Preemption
from torchrec_checknrun.schedule.triggers import AtEnd, Moment, OnSigterm, Trigger

LEAD = 3
"""Steps ahead: as many batches as TorchRec's pipelines have in flight, so that a rank's Python code
is hardly ever further on than rank 0's."""

_SAVE = "save"
_END = "end"
_OFF = "off"
_FURTHEST = 1 << 16
"""Largest number of steps ahead."""
_URGENT_SECONDS = 1.0


class Schedule:
    """The steps at which checkpoints are due, the same on all ranks.

    Construct it on all ranks at once, with equal triggers. Without a trigger that only rank 0 can
    answer, asking costs no communication; with one, each other rank looks into the store once per
    step.

    Attributes:
        at_end: whether a checkpoint is due when the checkpointer is closed.
        ending: whether the due checkpoint is the last: save it, wait for it no longer than
            ``remaining_seconds``, then call ``end``. The same on all ranks; stays until then.
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
        """Return the seconds until the process ends by itself after SIGTERM; infinite before."""
        return self._preemption.remaining_seconds if self._preemption else math.inf

    def due(self, step: int) -> bool:
        """Tell whether to begin a checkpoint after this step; call it on all ranks at every step.

        Returns:
            The same answer on all ranks.

        Raises:
            StoreUnreachable: the ranks can't agree any more.
        """
        now = Moment(step, self._clock() - self._begun)
        at_step = [trigger.due(now) for trigger in self._by_step]
        word = self._agreed(now)
        self.ending = self.ending or word == _END
        return any(at_step) or word is not None or self.ending

    def saved(self) -> None:
        """Note that a checkpoint was begun, for whatever reason: seconds count from now."""
        self._begun = self._clock()
        self._wanted = False

    def end(self) -> None:
        """End the process like SIGTERM would have, when ``ending`` and saved (or not).

        Raises:
            SystemExit: there was no Python handler for SIGTERM, which would have been run instead.
        """
        preemption, self._preemption = self._preemption, None
        assert preemption is not None
        self.ending = False
        preemption.end()

    def close(self, failed: bool = False) -> None:
        """Restore SIGTERM's handler; after a SIGTERM, end the process as ``end`` does.

        Args:
            failed: whether an exception is on its way out, and the other ranks may not come.

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


class Appointments:
    """One rank's view of the steps that all ranks act at.

    Args:
        store: used by this thread alone; no other code uses its keys.
        lead: how many steps ahead rank 0 announces; doubled whenever that was too few.
        patience: seconds that a rank waits for rank 0's word before it calls the appointment off.
        urgent_patience: seconds that rank 0 waits for acknowledgements of an urgent wish.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        lead: int = LEAD,
        patience: float = 60.0,
        urgent_patience: float = _URGENT_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = world_size - 1
        self._lead = self._shortest = lead
        self._patience = patience
        self._urgent_patience = urgent_patience
        self._number = 0
        self._step: int | None = None
        """The announced step, once known here; on other ranks than 0: known and acknowledged."""
        self._announced_at = 0
        """On rank 0: the step after which the announcement was made."""

    def agreed(self, step: int, wish: str | None, urgent: bool = False) -> str | None:
        """Return rank 0's wish at the step that all ranks have agreed on; None at other steps.

        Call it on all ranks after each step, with the same step numbers, which may go back: a
        restore of an older checkpoint takes them back.

        Args:
            wish: on rank 0: what all ranks should do soon, any word; None: nothing (now, or any
                more). Ignored on other ranks.
            urgent: on rank 0: whether steps may be slow and the next one is better than the third;
                worth a second of waiting for the others.

        Returns:
            The same on all ranks.

        Raises:
            StoreUnreachable: rank 0, or the process that keeps the store, is gone.
        """
        try:
            return self._invite(step, wish, urgent) if self._rank == 0 else self._follow(step)
        except DistError as error:
            raise StoreUnreachable(
                "the store through which ranks agree on a checkpoint can't be reached: the process "
                "that keeps it (rank 0 or torchrun's agent) has ended or is cut off; restart the "
                f"job: {error}"
            ) from error

    def close(self) -> None:
        """Call off a pending appointment, so that the other ranks don't wait for this one."""
        if self._step is not None:
            with suppress(DistError):
                self._settle(_OFF)

    def _invite(self, step: int, wish: str | None, urgent: bool) -> str | None:
        if self._step is not None and step <= self._announced_at:
            self._settle(_OFF)  # else it would be kept when training gets there again
        if self._step is not None and step >= self._step:
            on_time = step == self._step
            complete = on_time and self._acknowledged(self._urgent_patience if urgent else 0.0)
            word = self._settle(wish if wish is not None and complete else _OFF)
            if word != _OFF:
                self._lead = max(self._lead // 2, self._shortest)
                return word
            if wish is not None:
                self._lead = min(2 * self._lead, _FURTHEST)
        if self._step is None and wish is not None:
            self._announced_at = step
            self._step = step + (1 if urgent and self._lead == self._shortest else self._lead)
            self._store.set(self._key("step"), str(self._step))
        return None

    def _follow(self, step: int) -> str | None:
        while True:
            if self._step is None:
                if not self._store.check([self._key("step")]):
                    return None
                self._step = int(self._store.get(self._key("step")))
                if step <= self._step:
                    self._store.add(self._key("acknowledged"), 1)
            now = step == self._step
            if step < self._step and not self._is_off():
                return None
            if now:
                _poll(lambda: self._store.check([self._key("word")]), self._patience)
            word = self._settle(_OFF)  # unless rank 0 has written another word
            if word != _OFF and now:
                return word

    def _is_off(self) -> bool:
        """Tell whether rank 0 was far enough ahead to miss this rank's acknowledgement."""
        word = self._key("word")
        return self._store.check([word]) and self._store.get(word) == _OFF.encode()

    def _acknowledged(self, patience: float) -> bool:
        """Tell whether all other ranks acknowledge in time, before one of them calls it off."""

        def settled() -> bool:
            count = self._store.add(self._key("acknowledged"), 0)
            return count >= self._others or self._store.check([self._key("word")])

        return _poll(settled, patience)

    def _settle(self, word: str) -> str:
        """Write the appointment's one word, or return the one that was written before."""
        settled: str = self._store.compare_set(self._key("word"), "", word).decode()
        self._number += 1
        self._step = None
        return settled

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"


def _poll(condition: Callable[[], bool], patience: float) -> bool:
    """Return whether a condition comes true within ``patience`` seconds; check it at least once."""
    deadline = time.monotonic() + patience
    pause = 0.0005
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
