"""Have all ranks hear of a save's outcome after the same training step.

A save ends in the background, for each rank at another point of its training. Told at once, one
rank's callbacks, or its handling of an error, would run a step before those of the others, and wait
for ever where they call a collective. So the backgrounds agree on a step that no rank has done yet.
"""

from __future__ import annotations

import logging
import threading

from torchrec_checknrun.ranks import Ranks

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_MOMENT_SECONDS = 1.0


class CommonStep:
    """One rank's view of the step after which all ranks hear of a save's outcome.

    Steps are counted here, from the save's begin on: a program may set its own count anew.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0
        self._proposed: int | None = None
        """Kept once agreed on; None: no rank need wait for another."""
        self._agreed = False

    def reached(self) -> bool:
        """Note in the training thread that a step is done; return whether to tell the outcome.

        Waits where this very step is proposed, for the milliseconds until all ranks have answered.
        """
        with self._changed:
            self._done += 1
            while not self._agreed and self._is_proposed:
                self._changed.wait()
            return self._agreed and (self._proposed is None or self._is_proposed)

    def settled(self) -> bool:
        """Hear that training has waited for the outcome, as it does on all ranks at once; wait for
        the moment until the ranks have agreed. Return whether they have.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._agreed, _MOMENT_SECONDS)

    def agree(self, ranks: Ranks) -> None:
        """Agree on the step in the background, once the outcome is known; a collective.

        Where a rank is lost, which ends training on the others as well, each hears at its next
        step.
        """
        lead = 1
        try:
            while ranks.world_size > 1 and not ranks.parted:
                step = ranks.largest(self._done) + lead
                if not ranks.largest(not self._propose(step)):
                    break
                self._withdraw()
                lead *= 2
        except Exception as error:
            logger.debug("ranks may hear of a save's outcome a step apart: %r", error)
            self._withdraw()
        finally:
            with self._changed:
                self._agreed = True
                self._changed.notify_all()

    @property
    def _is_proposed(self) -> bool:
        """Return whether training has done the step that is proposed."""
        return self._proposed is not None and self._done >= self._proposed

    def _propose(self, step: int) -> bool:
        """Propose a step; return whether training has yet to do it."""
        with self._changed:
            ahead = self._done < step
            self._proposed = step if ahead else None
            return ahead

    def _withdraw(self) -> None:
        with self._changed:
            self._proposed = None
            self._changed.notify_all()
