"""Delete one checkpoint after the other: what fails stops only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torchrec_checknrun.errors import CheckNRunError, StorageFailed, StorageUnreachable
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.store.folder import Folder


class Deletion:
    """Delete checkpoints, children before their parents, and leftovers. One that can't be deleted
    stops no other, except those that it needs.

    Args:
        still_ours: raises an error once nothing more may be deleted.

    Attributes:
        odd: what stays since it holds something that is no file.
        failed: what the storage refused.
    """

    def __init__(
        self, root: Folder, known: Mapping[str, Manifest], still_ours: Callable[[], object]
    ) -> None:
        self._root = root
        self._known = known
        self._still_ours = still_ours
        self._needed: set[str] = set()
        self.odd: list[str] = []
        self.failed: list[StorageFailed] = []

    def __call__(self, id: str, delete: Callable[[Folder], list[str]]) -> bool:
        """Delete one; return whether nothing is left of it.

        Raises:
            StorageUnreachable: the storage doesn't answer.
        """
        if id in self._needed:
            return False
        self._still_ours()
        where = f"{self._root}/{id} stays"
        try:
            kept = delete(self._root / id)
        except (CheckNRunError, StorageFailed) as error:
            if isinstance(error, StorageUnreachable):
                raise
            self._needed |= with_parents(self._known, {id})
            if isinstance(error, StorageFailed):
                self.failed.append(error)
            else:
                self.odd.append(f"{where}: {error}")
            return False
        if kept:
            self.odd.append(f"{where}: it holds {kept}, which no checkpoint has: remove them")
        return not kept


def with_parents(known: Mapping[str, Manifest], ids: Collection[str]) -> set[str]:
    """Also what these checkpoints need."""
    todo, found = list(ids), set[str]()
    while todo:
        id = todo.pop()
        link = known[id].parent if id in known and id not in found else None
        found.add(id)
        todo += [link.id] if link else []
    return found
