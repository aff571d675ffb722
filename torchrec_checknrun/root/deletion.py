"""Delete checkpoints and leftovers of failed saves one by one; a failure stops only the parents.

A checkpoint's manifest goes first, so that a crash halfway leaves either the whole checkpoint or a
leftover, which the next pruning removes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from torchrec_checknrun.errors import (
    CheckNRunError,
    CorruptCheckpoint,
    RootInUse,
    StorageFailed,
    StorageUnreachable,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import (
    MANIFEST_NAME,
    PRIORITY_SAVES,
    CheckpointId,
    parse_id,
)
from torchrec_checknrun.root.checkpoints import has_manifest
from torchrec_checknrun.root.lineage import parent_among
from torchrec_checknrun.root.retention import PINNED
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import FOLDER
from torchrec_checknrun.writers.liveness import is_abandoned


class _Stays(CheckNRunError):
    """Say why something has to stay after all."""


class Deletion:
    """Deletion of checkpoints, children before their parents, and of leftovers. A checkpoint that
    can't be deleted keeps only those that it needs.

    Args:
        still_ours: raises ``RootInUse`` once nothing more may be deleted.

    Attributes:
        odd: what stays because it contains something other than files.
        failed: errors of the storage.
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

    def checkpoint(self, id: str) -> bool:
        """Delete a committed checkpoint; return whether its directory is gone.

        Raises:
            StorageUnreachable: the storage doesn't answer.
        """
        return self._delete(id, partial(delete_checkpoint, still_ours=self._still_ours))

    def leftover(self, id: str) -> bool:
        """Delete a leftover of a failed save; return and raise as ``checkpoint``."""
        self._still_ours()
        return self._delete(id, _delete_uncommitted)

    def _delete(self, id: str, delete: Callable[[Folder], list[str]]) -> bool:
        if id in self._needed:
            return False
        where = f"{self._root}/{id} stays"
        try:
            kept = delete(self._root / id)
        except (CheckNRunError, StorageFailed) as error:
            if isinstance(error, (RootInUse, StorageUnreachable)):
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
    """Return the given ids with those of all checkpoints that they need."""
    todo, found = list(ids), set[str]()
    while todo:
        id = todo.pop()
        parent = parent_among(known[id], known) if id in known and id not in found else None
        found.add(id)
        todo += [parent.id] if parent is not None else []
    return found


def find_leftovers(
    root: Folder, ids: Iterable[CheckpointId], below: int | None, problems: list[str]
) -> Iterator[str]:
    """Yield the names of directories that failed saves have left, without a manifest.

    Args:
        ids: the names of the directories to look into.
        below: consider only lower sequence numbers; None for all.
        problems: receives a line for each directory that can't be looked into.

    Raises:
        StorageUnreachable: the storage doesn't answer.
    """
    for id in ids:
        name = id.name
        if below is not None and id.sequence >= below:
            continue
        try:
            if _is_leftover(root, name):
                yield name
        except (CheckNRunError, OSError) as error:
            if isinstance(error, StorageUnreachable):
                raise
            problems.append(f"{root}/{name} stays: {error}")


def delete_priority_saves(root: Folder) -> list[str]:
    """Delete the priority saves of checkpoints that are gone, of which no rank can make use.

    A rank deletes its own at its next one; those of ranks that a run no longer has stay until now.

    Returns:
        The names of the deleted directories.

    Raises:
        StorageFailed: the storage refused.
    """
    saves = root / PRIORITY_SAVES
    of = {name: parse_id(name.partition(".")[0]) for name in saves.names()}
    if not of:
        return []
    live = set(root.names())
    absent = {id.name for id in of.values() if id is not None} - live
    absent = {name for name in absent if not has_manifest(root, name)}  # a listing may lag behind
    gone = [name for name, id in of.items() if id is not None and id.name in absent]
    for name in gone:
        _delete_files(saves / name)
    saves.remove()  # unless there are others
    return gone


def delete_checkpoint(folder: Folder, still_ours: Callable[[], object] = lambda: None) -> list[str]:
    """Delete a checkpoint's files and directory; return the names that aren't files.

    Minutes may have passed since the pruning looked at pins and claims. Whoever pins a checkpoint,
    or makes it count, looks for the manifest afterwards, and here pins and claims are looked at
    after the manifest is gone: one of both sees the other.

    Args:
        still_ours: raises ``RootInUse`` once nothing more may be deleted.

    Raises:
        RootInUse: from ``still_ours``; the checkpoint stays.
        CheckNRunError: the checkpoint was pinned meanwhile, and stays.
    """

    def look() -> None:
        still_ours()
        if folder.size(PINNED) is not None:
            raise _Stays("it was pinned meanwhile")

    try:
        manifest = folder.read(MANIFEST_NAME)
    except (FileNotFoundError, CorruptCheckpoint):  # nothing that could be put back
        manifest = None
    look()
    folder.delete(MANIFEST_NAME)
    try:
        look()
    except (CheckNRunError, OSError):
        if manifest is not None:
            folder.put(MANIFEST_NAME, manifest)
        raise
    return _delete_files(folder)


def _is_leftover(root: Folder, name: str) -> bool:
    """Tell whether a directory is a leftover.

    Raises:
        CorruptCheckpoint: the manifest is no plain file: rank files may be all that is left of the
            checkpoint.
    """
    if root.is_special(name) or root.size(name) is not None:
        return False  # a file of that name is not this package's
    folder = root / name
    names = folder.names()
    if MANIFEST_NAME in names:
        if folder.size(MANIFEST_NAME) is None:
            folder.read(MANIFEST_NAME)  # says what is wrong
        return False
    if PINNED in names:
        return False  # somebody keeps it, although its manifest is gone
    return is_abandoned(folder)  # a compaction has a claim of its own, not an epoch of the root


def _delete_uncommitted(folder: Folder) -> list[str]:
    """Delete the files and directory of a leftover; return as ``delete_checkpoint``.

    Raises:
        CheckNRunError: the leftover was committed meanwhile, and stays.
    """

    def look() -> None:
        if folder.size(MANIFEST_NAME) is not None:
            raise _Stays("it was committed meanwhile")

    return _delete_files(folder, look)


def _delete_files(folder: Folder, before_each: Callable[[], object] = lambda: None) -> list[str]:
    files, kept = folder.sizes(), []
    for name in folder.names():
        if name in files or folder.is_link(name):
            before_each()
            folder.delete(name)
        elif name == FOLDER:
            claims = folder / FOLDER
            for claim in claims.sizes():
                claims.delete(claim)
            claims.remove()
        else:
            kept.append(name)
    folder.remove()
    return kept
