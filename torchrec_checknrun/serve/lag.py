"""Tell how far a served version is behind the root, without comparing two hosts' clocks."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import datetime

from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.serve.version import Version
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)


class Lag:
    """The last look at a root, and its time.

    Times of commits are the store's, or the writer's where the store keeps none: one clock has
    stamped both that are compared. What has passed since a look is counted by this process's clock.

    Attributes:
        shown: the checkpoint that is served; None before the first.
        error: the last error of a look; None after a look without.
    """

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._newest: Manifest | None = None
        self.shown: Manifest | None = None
        self._behind = 0.0
        self._looked = time.monotonic()
        self.error: str | None = None

    def commit_time(self, manifest: Manifest) -> float | None:
        """Return when a checkpoint was committed, by the store's clock; None if it keeps none."""
        return (self._root / manifest.id).modified(MANIFEST_NAME)

    def sees(self, head: Manifest) -> None:
        """Note the newest checkpoint, which is not served yet."""
        self._newest = head
        self._looked = time.monotonic()
        if self.shown is not None:
            times = [self.commit_time(manifest) for manifest in (self.shown, head)]
            if None in times:
                times = [_created(manifest) for manifest in (self.shown, head)]
            before, after = times
            assert before is not None
            assert after is not None
            self._behind = max(0.0, after - before)

    def shows(self, head: Manifest) -> None:
        """Note the checkpoint that is served from now on; say so where it is an older one."""
        if self.shown is not None and head.sequence < self.shown.sequence:
            logger.warning(
                "%s is served in place of %s, a newer one that is no longer in %s: it was deleted, "
                "or another run's root is in that place",
                *(head.id, self.shown.id, self._root),
            )
        self.shown = head
        self._behind = 0.0

    def looked(self, head: Manifest | None, error: str | None = None) -> None:
        """Note that a look has succeeded.

        Args:
            head: the newest checkpoint that can be used.
            error: why newer ones can't be.
        """
        self._looked = time.monotonic()
        self.error = error
        if error is None:
            self._newest, self._behind = head, 0.0

    def failed(self, error: BaseException) -> None:
        """Note an error."""
        self.error = f"{type(error).__name__}: {error}"

    def told(self, version: Version) -> Version:
        """Return a version with what is known of its lag now."""
        steps = 0 if self._newest is None else self._newest.step - version.step
        seconds = self._behind + time.monotonic() - self._looked
        return replace(version, lag_seconds=seconds, lag_steps=steps, error=self.error)


def _created(manifest: Manifest) -> float:
    return datetime.fromisoformat(manifest.created_at).timestamp()
