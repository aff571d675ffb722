"""Prune in the background, after a commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.prune import Pruned

logger = logging.getLogger(__name__)


class Pruner:
    """A background thread that prunes after a commit, one run at a time. Used on rank 0 only.

    Failures are logged: an extra checkpoint does no harm.
    """

    def __init__(self, prune: Callable[[Manifest], Pruned]) -> None:
        self._prune = prune
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    def start(self, last: Manifest) -> None:
        """Prune after the commit of a checkpoint; do nothing while a pruning still runs."""
        if self._thread is not None and self._thread.is_alive():
            return  # the next commit prunes
        thread = threading.Thread(
            target=self._run, args=(last,), name="checknrun-prune", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had, or the interpreter ends
            logger.warning("pruning failed, the next commit tries again: %s", error)
        else:
            self._thread = thread

    def wait(self, seconds: float) -> None:
        """Wait for a running pruning, at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, last: Manifest) -> None:
        try:
            done = self._prune(last)
        except Exception as error:
            logger.warning("pruning failed, the next commit tries again: %s", error)
            return
        for problem in done.problems:
            if problem not in self._told:
                self._told.add(problem)
                logger.warning("%s", problem)
        if done.verdict.delete or done.leftovers:
            logger.info(
                "deleted %d checkpoints (%.2f MB) and %d leftovers of failed saves",
                len(done.verdict.delete),
                done.bytes / 1e6,
                len(done.leftovers),
            )
