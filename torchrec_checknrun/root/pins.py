"""Pins: records in checkpoints' directories that keep them from being deleted.

Whatever is there under a pin's name keeps the checkpoint, damaged or not: that is the safe side.
"""

from __future__ import annotations

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.sealed import seal, unseal
from torchrec_checknrun.root.chain import read_manifest
from torchrec_checknrun.store.folder import Folder

PINNED = "pinned"
"""The file in a checkpoint's directory that keeps it."""
_MOST_BYTES = 1 << 16


def pin(root: Folder, id: str) -> None:
    """Keep a checkpoint, and what it needs, until it is unpinned.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is no such checkpoint.
    """
    read_manifest(root, id)
    write_pin(root, id)


def write_pin(root: Folder, id: str) -> None:
    """Write a checkpoint's pin, in the place of a damaged one as well."""
    (root / id).put(PINNED, seal("pin", {"id": id}))


def unpin(root: Folder, id: str) -> None:
    """Take a pin away, if there is one."""
    (root / id).delete(PINNED)


def is_pinned(folder: Folder) -> bool:
    """Return whether a checkpoint's directory holds a pin, or anything else under its name."""
    try:
        return PINNED in folder.names()
    except CorruptCheckpoint:  # the directory itself is a link: nothing in there is the root's
        return False


def pin_problem(root: Folder, id: str) -> str | None:
    """Say what is wrong with a checkpoint's pin; None if there is none, or a sound one.

    Raises:
        StorageFailed: the storage refused.
    """
    try:
        data = (root / id).read(PINNED, 0, _MOST_BYTES + 1)
        if unseal(data, "pin", _MOST_BYTES) == {"id": id}:
            return None
        what = "it is another checkpoint's"
    except FileNotFoundError:
        return None
    except (ValueError, CorruptCheckpoint) as error:
        what = str(error)
    return (
        f"{root}/{id}/{PINNED}: {what}. It keeps the checkpoint nevertheless; `checknrun repair "
        f"{root}` writes it anew, `checknrun unpin` takes it away"
    )
