"""Differential checkpoints by ``dcp.save``, which does not tell a planner the outcome of a save."""

from __future__ import annotations

import logging
import os
import weakref
from typing import ClassVar

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointExists,
    CheckpointNotFound,
    CorruptCheckpoint,
)
from torchrec_checknrun.format.manifest import Link
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.marks.cuts import Cut
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.root.chain import Chain, read_manifest, resolve
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger(__name__)


class DirectInterval:
    """The interval between two ``dcp.save`` of one tracked model.

    ``dcp.save`` doesn't tell a planner the outcome, so the next save looks for the last one's
    manifest: the rows of a save without one are marked again.

    Attributes:
        widths: the fewest bits of a value since the last full checkpoint, by table.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[TrackedModel, DirectInterval]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._parent: tuple[str, Link] | None = None
        self._chain: list[str] = []
        """The names of the directories that a restore of the parent reads."""
        self._pending: tuple[Folder, Cut] | None = None
        self._restores = 0
        self.widths: dict[str, int] = {}

    @classmethod
    def of(cls, tracked: TrackedModel) -> DirectInterval:
        """Return a tracked model's interval, with the last save's outcome noted."""
        interval = cls._of.setdefault(tracked, cls())
        if interval._restores != tracked.restores:
            # Rows were restored since the last checkpoint: the next one can only be full.
            interval = cls._of[tracked] = cls()
            interval._restores = tracked.restores
        if interval._pending is not None:
            folder, cut = interval._pending
            try:
                manifest = read_manifest(folder.parent, folder.name)
                interval._parent = (folder.parent.url, manifest.link)
                widths = Chain((manifest,)).widths
                chain = interval._chain if manifest.parent else ()
                interval._chain = [*chain, folder.name]
                if manifest.kind == "differential":
                    widths = {t: min(bits, interval.widths[t]) for t, bits in widths.items()}
                interval.widths = widths
                tracked.forget(cut)
            except (CheckpointNotFound, CorruptCheckpoint):
                tracked.merge(cut)
            cut.consolidate()  # training waits for a save anyway
            interval._pending = None
        if tracked.converted:
            interval._parent = None  # a differential checkpoint can't follow
            tracked.converted = False
        return interval

    def begin(self, path: str | os.PathLike[str]) -> Link | None:
        """Return the parent for a differential checkpoint at ``path``: the last one, if that is
        beside it and whole: those who number directories often delete the oldest ones.

        Raises:
            CheckpointExists: ``path`` holds a checkpoint, which would be mistaken for this one.
        """
        folder = Folder(path)
        if folder.size(MANIFEST_NAME) is not None:
            raise CheckpointExists(
                f"{folder} already holds a checkpoint: save into a new directory"
            )
        if self._parent is None or folder.parent.url != self._parent[0]:
            return None
        link = self._parent[1]
        if not {*self._chain} <= {*folder.parent.names()}:  # unless a compacted copy stands in
            try:
                resolve(folder.parent, link.id)
            except CheckNRunError as error:
                logger.warning(
                    "%s is a full checkpoint, since the last one can't be restored any more: %s. "
                    "Keep what differential checkpoints build on: `checknrun prune` does",
                    folder,
                    error,
                )
                return None
        return link

    def pending(self, path: str | os.PathLike[str], cut: Cut) -> None:
        """Keep a cut until the outcome of the save at ``path`` is known."""
        self._pending = (Folder(path), cut)
