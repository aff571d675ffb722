"""The state of one checkpoint on its way to storage, shared by training and the background."""

from __future__ import annotations

import os
import threading
import time
from typing import NoReturn

from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointExists,
    CorruptCheckpoint,
    SaveFailed,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.root.report import Progress
from torchrec_checknrun.save.common_step import CommonStep
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.items import Fingerprint
from torchrec_checknrun.store.deadlines import Patience
from torchrec_checknrun.threads import leave_at_exit

_OF_STORAGE = (CorruptCheckpoint, CheckpointExists)
"""Errors about files found where a new checkpoint is to be written, which would seem to be about an
older checkpoint if raised by themselves.
"""
_LEAVE_SECONDS = 10.0


class Save:
    """One checkpoint on its way to storage.

    Attributes:
        proposal: rank 0's decision on the checkpoint.
        cut: the cut marks, to be merged back unless the checkpoint is committed; None if there is
            no snapshot.
        begun: when training began to wait, by the monotonic clock.
        patience: deadlines of the storage operations of this checkpoint.
        progress: times of the phases, in seconds since ``begun``.
        fingerprint: this rank's fingerprint of the content beside table rows; None until known.
        common_step: the step after which all ranks hear of the outcome.
        rows: rows of the cut that are copied on write; None without any.
        links: the changes to the references of tables stored as differences; None without any.
        thread: the background thread, once started.
        process: the id of the process whose threads do the work.
    """

    def __init__(
        self,
        proposal: Proposal,
        cut: Cut | None,
        begun: float,
        patience: Patience,
        links: Transaction | None = None,
    ) -> None:
        self.proposal = proposal
        self.cut = cut
        self.begun = begun
        self.patience = patience
        self._lock = threading.Lock()
        self._committing = self._given_up = False
        self.progress = Progress()
        self.common_step = CommonStep()
        self.fingerprint: Fingerprint | None = None
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.rows: CutRows | None = None
        self.links = links
        self.thread: threading.Thread | None = None
        self.process = os.getpid()

    @property
    def done(self) -> bool:
        """Return True once the outcome is known on this rank."""
        return self._done.is_set()

    @property
    def known(self) -> threading.Event:
        """Return the event of the outcome, which is set once that is known on this rank."""
        return self._done

    def leave(self) -> None:
        """Join the thread of a save that is ``done``, before other ends of the process are made:
        it may still agree with other ranks.
        """
        if self.thread is not None and not self._given_up:
            self.thread.join(_LEAVE_SECONDS)

    def result(self) -> Manifest:
        """Return the manifest of a save that is ``done``, once the ranks have agreed when to hear.

        Raises:
            SaveFailed, UnsupportedState, InvalidPlan …: the checkpoint was not committed.
        """
        if not self._given_up:
            self.common_step.settled()
        if self._error is not None:
            _raise_as_failed(self._error, self.proposal.header.step)
        assert self._manifest is not None
        return self._manifest

    def finish(self, manifest: Manifest | None, error: BaseException | None = None) -> None:
        """Set the outcome, unless it is known already."""
        self.end_protection()  # of a save that was given up: training must not wait for its sake
        with self._lock:
            if self._done.is_set():
                return
            self._manifest, self._error = manifest, error
            self.progress.committed = time.monotonic() - self.begun
            self._done.set()

    def end_protection(self) -> None:
        """End the protection of rows that are copied on write; idempotent."""
        rows = self.rows
        if rows is not None:
            rows.close()

    def begin_commit(self) -> None:
        """Refuse to be given up from now on: the storage decides whether the commit succeeds.

        Raises:
            SaveFailed: the save was given up.
        """
        with self._lock:
            if self._given_up:
                raise SaveFailed(f"{self.proposal.id} was given up before it was committed")
            self._committing = True

    def give_up(self, error: Exception, force: bool = False) -> bool:
        """Fail with ``error`` and never commit; return False during the commit.

        Args:
            force: fail even during the commit, whose outcome then stays unknown.
        """
        with self._lock:
            if self._committing and not force:
                return False
            self._given_up = True
            if self.thread is not None:
                leave_at_exit(self.thread)
        self.finish(None, error)
        return True


def _raise_as_failed(error: BaseException, step: int) -> NoReturn:
    """Raise an error of this package as it is, and any other one as ``SaveFailed``."""
    known = isinstance(error, CheckNRunError) and not isinstance(error, _OF_STORAGE)
    if known or not isinstance(error, Exception):
        raise error
    of_storage = isinstance(error, (OSError, *_OF_STORAGE))
    remedy = "fix the storage and save again" if of_storage else "save again"
    has_path = isinstance(error, OSError) and error.filename is not None  # which repr leaves out
    what = f"{type(error).__name__}({error})" if has_path else repr(error)
    raise SaveFailed(
        f"the checkpoint at step {step} was not committed: {what}. Its rows are kept for the "
        f"next one; {remedy}"
    ) from error
