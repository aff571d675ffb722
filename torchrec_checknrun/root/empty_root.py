"""Describe a root in which no committed checkpoint was found: most are typos in its name."""

from __future__ import annotations

import difflib

from torchrec_checknrun.errors import CheckNRunError, CheckpointNotFound
from torchrec_checknrun.format.manifest import sequence_of
from torchrec_checknrun.root.chain import committed, has_manifest
from torchrec_checknrun.root.claims import FOLDER
from torchrec_checknrun.store.folder import Folder

_MOST_NAMED = 5


def describe_empty(root: Folder) -> str:
    """Describe a root in which no committed checkpoint was found: what is there instead, and which
    folders beside it have a similar name.

    Raises:
        StorageFailed: the root can't be listed.
    """
    names = [name for name in root.names() if name != FOLDER]
    neighbours = _neighbours(root)
    begun = [name for name in names if sequence_of(name) is not None]
    there = [name for name in begun if has_manifest(root, name)]
    if there:
        found = f"{root} holds {len(there)} checkpoint(s), as {there[-1]}"
    elif begun:
        found = f"{root} holds {len(begun)} checkpoint(s) that were begun, none committed"
    elif names:
        shown = ", ".join(map(_shown, names[:_MOST_NAMED]))
        found = f"{root} holds no checkpoint, but {shown}{', …' * (len(names) > _MOST_NAMED)}"
    elif root.name in neighbours:
        found = f"{root} is empty"
    else:
        found = f"{root} does not exist"
    matches = difflib.get_close_matches(root.name, neighbours, _MOST_NAMED, cutoff=0.75)
    similar = [name for name in matches if name != root.name]
    return f"{found} (beside it: {', '.join(similar)})" if similar else found


def require_root(root: Folder) -> None:
    """Refuse a folder in which no run has ever saved anything.

    Raises:
        CheckpointNotFound: names what is there instead.
        StorageFailed: the root can't be listed.
    """
    names = root.names()
    if FOLDER not in names and not committed(root, names):
        raise CheckpointNotFound(
            f"no run has saved anything here: {describe_empty(root)}. Name the folder or URL that "
            "was given to Checkpointer"
        )


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _neighbours(root: Folder) -> list[str]:
    """List what is beside the root, itself included; nothing where that can't be listed."""
    try:
        return root.parent.names()
    except (CheckNRunError, OSError):
        return []
