"""Have this rank's file of each checkpoint copied into memory while the file is written."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.shared_memory.space import require_space
from torchrec_checknrun.store.file_copy import NO_COPY, CopyTo
from torchrec_checknrun.tiers.copies_folder import CopiesFolder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

INDEXES = 16 << 20
"""Bytes for what a file holds beside its content, which is more than that of a small model."""


class OutgoingCopies:
    """The copies of one rank's own files, each until it is known where it belongs.

    Args:
        full_bytes: what the file of a full checkpoint takes, about.
        most: the most bytes of one copy.
        missing: what the log says of copies that are missing.
    """

    def __init__(
        self, folder: CopiesFolder, rank: int, full_bytes: int, most: int, missing: str
    ) -> None:
        self.folder = folder
        self._rank, self._full_bytes, self._most = rank, full_bytes, most
        self._id = ""
        self._chain: tuple[str, ...] = ()
        self._missing, self._told = missing, False

    def begin(self, id: str, chain: Sequence[str]) -> None:
        """Note the checkpoint that is about to be written, in the training thread.

        Args:
            chain: ids of those that it builds on.
        """
        self._id, self._chain = id, tuple(chain)

    @property
    def copy_to(self) -> CopyTo:
        """Return the second destination of this rank's file while it is written."""
        try:
            path = self.folder.new_outgoing(self._rank, self._id)
            # What a full checkpoint takes, as far as the budget goes.
            require_space(path.parent, min(self._most, self._full_bytes))
        except (OSError, ImagesRefused) as error:
            self._tell(f"there is no room for this rank's: {error}")
            return NO_COPY
        return CopyTo(str(path), self._most)

    def _tell(self, why: str) -> None:
        """Say once why there are no copies."""
        if not self._told:
            self._told = True
            logger.warning("%s: %s", self._missing, why)
