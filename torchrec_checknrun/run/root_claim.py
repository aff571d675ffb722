"""Claim a root for one run: no other run, and no other Checkpointer of this process, writes to it.

Rank 0 takes the claim and every rank looks it up, so that ranks which see different storage are
told so before they write.
"""

from __future__ import annotations

import logging
import weakref
from typing import ClassVar

from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.recovery.missing_root import protect_unasked
from torchrec_checknrun.root.shared_root import require_shared
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Holder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


class RootClaim:
    """The right of one run to write to its root.

    Args:
        writer: takes and renews the claim, on rank 0.
    """

    _taken: ClassVar[weakref.WeakSet[RootClaim]] = weakref.WeakSet()
    """The claims of this process that were taken and are not closed."""

    def __init__(self, root: Folder, ranks: Ranks, writer: RootWriter) -> None:
        self._root = root
        self._ranks = ranks
        self._writer = writer
        self._is_taken = self._was_tried = self._is_seen = False

    @property
    def is_taken(self) -> bool:
        """Return whether this run has claimed the root, on all ranks alike."""
        return self._is_taken

    def take(self) -> None:
        """Make this run the only one that writes to the root; a collective until that holds.

        Raises:
            RootInUse: another run, or another Checkpointer of this process, writes to the root.
            RootNotShared: some rank doesn't see the claim.
        """
        if not self._is_taken:
            self._ranks.from_rank_0(self._take)
            self._is_taken = True
            RootClaim._taken.add(self)
        if not self._is_seen:
            name = self._writer.lease.claim.name if self._ranks.rank == 0 else ""
            self._is_seen = require_shared(self._root, self._ranks, FOLDER, name)

    def take_early(self) -> None:
        """Take the claim at a run's first step, so that two runs in one root hear of it at once.

        Storage that fails here is asked again at the first save.

        Raises:
            RootInUse: another run writes to the root.
        """
        if self._was_tried:
            return
        self._was_tried = True
        try:
            self.take()
        except OSError as error:
            if self._ranks.rank == 0:
                logger.warning("the root was not claimed yet: %s", error)

    def close(self) -> None:
        """Let another Checkpointer of this process claim the root."""
        RootClaim._taken.discard(self)

    def _take(self) -> None:
        here = Holder.this_process()
        for other in RootClaim._taken:
            same = other._root.place == self._root.place
            if same and other._writer.lease.claim.holder == here:
                raise RootInUse(
                    f"another Checkpointer of this process writes to {self._root} and was not "
                    "closed: close() it first, or give this one a root of its own"
                )
        warning = protect_unasked(self._root, self._writer)
        self._writer.claim()
        if warning is not None:
            logger.warning("%s", warning)
