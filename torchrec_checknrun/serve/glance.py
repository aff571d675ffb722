"""Tell from a listing alone that nothing was committed since the last look: most polls end here."""

from __future__ import annotations

from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.root.checkpoints import has_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import FOLDER


class Glance:
    """The names that a root held at the last look.

    A commit adds a directory, or a manifest to one that was there: those are looked at that could
    be newer than what is served. What is deleted is missing in the listing.
    """

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._names: list[str] | None = None

    def is_quiet(self, served: Manifest | None) -> bool:
        """List the root, and tell whether it is as at the last call, with nothing new committed.

        Args:
            served: the newest checkpoint of the last look; None: look in any case.

        Raises:
            StorageFailed: the storage failed.
        """
        names, before = self._root.names(), self._names
        self._names = names
        if served is None or names != before:
            return False
        return not any(
            has_manifest(self._root, name) for name in names if self._may_be_newer(name, served)
        )

    @staticmethod
    def _may_be_newer(name: str, served: Manifest) -> bool:
        if name in (served.id, FOLDER) or name.startswith("."):
            return False
        id = parse_id(name)
        return id is None or id.sequence >= served.sequence
