"""Keep the outcomes of checkpoints until the training loop asks for them.

A checkpoint ends behind training, where nobody can catch its error: the error is raised at the next
call on the rank where it happened, or only logged while failures are allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torchrec_checknrun.model.hand_written import Overwritten, RowsOverwritten
from torchrec_checknrun.root.report import CheckpointReport

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


class Outcomes:
    """One rank's failures and reports that its training loop has not heard of.

    Args:
        max_failures: failures one after the other that are only logged.
        callbacks: called with the report of each committed checkpoint.
    """

    def __init__(
        self, max_failures: int, callbacks: Sequence[Callable[[CheckpointReport], object]]
    ) -> None:
        self._max_failures = max_failures
        self._callbacks = callbacks
        self._failures = 0
        self._error: BaseException | None = None
        self._report: CheckpointReport | None = None
        self._logged: BaseException | None = None
        """The last failure, if it was only logged, and nothing was committed since."""
        self._overwritten: Overwritten | None = None
        """The last checkpoint's failure, if training need not end for it: the next one copies what
        was written by hand before training goes on.
        """

    @property
    def has_failure(self) -> bool:
        """Return whether a failure waits to be raised."""
        return self._error is not None

    @property
    def to_be_made_again(self) -> bool:
        """Return whether the last checkpoint failed since the program wrote its rows by hand: not
        other weights, in whose place an evaluation's may be.
        """
        return isinstance(self._overwritten, RowsOverwritten)

    def failed(self, error: BaseException, tell: bool) -> None:
        """Keep a failure for the caller, or only log it where that is allowed.

        Args:
            tell: keep it even then.
        """
        if isinstance(error, Overwritten) and not tell and self._overwritten is None:
            logger.warning("%s", error)
            self._overwritten = error
            return
        self._failures += 1
        if tell or self._failures > self._max_failures or not isinstance(error, Exception):
            self._error = error
        else:
            logger.warning("failure %d of %d: %s", self._failures, self._max_failures, error)
            self._logged = error

    def committed(self, report: CheckpointReport) -> None:
        """Keep a committed checkpoint's report for the caller; failures are counted anew."""
        self._failures, self._logged, self._overwritten = 0, None, None
        self._report = report

    def tell(self, report: CheckpointReport) -> None:
        """Call the callbacks; log which of them fail."""
        for callback in self._callbacks:
            try:
                callback(report)
            except Exception:
                logger.exception("the callback %r failed", callback)

    def take(self, last: bool = False, end: bool = False) -> CheckpointReport | None:
        """Return the report kept since the last call; None without one.

        Args:
            last: raise also what training need not end for, since the caller waits for the last
                checkpoint.
            end: raise also a failure that was only logged: no next checkpoint has its rows.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan: a checkpoint was not committed.
        """
        if last and self._error is None:
            self._error, self._overwritten = self._overwritten, None
        if end and self._error is None:
            self._error = self._logged
        self.raise_failure()
        report, self._report = self._report, None
        return report

    def raise_failure(self) -> None:
        """Raise as ``take`` does, but leave a report for the next call."""
        error, self._error = self._error, None
        if error is not None:
            self._report = self._logged = None
            raise error
