"""Tell what lies where no checkpoint was found: a typo in a root must not begin training anew
unnoticed, and a run that starts anew on purpose must not delete what is there.
"""

from __future__ import annotations

import difflib
import logging

from torchrec_checknrun.agreement import require_nowhere
from torchrec_checknrun.chain import newest
from torchrec_checknrun.errors import CheckNRunError, CheckpointNotFound
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.lease import FOLDER
from torchrec_checknrun.manifest import sequence_of
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root_writer import RootWriter

logger = logging.getLogger("torchrec_checknrun.checkpointer")

_MOST_NAMED = 5


def start_anew(root: Folder, ranks: Ranks, *, required: bool) -> None:
    """Tell loudly that no checkpoint was found, and where; a collective.

    Raises:
        CheckpointNotFound: one is required.
        RootNotShared: other ranks see one.
    """
    require_nowhere(root, ranks)
    where = ranks.from_rank_0(lambda: describe_empty(root))
    if required:
        raise CheckpointNotFound(
            f"nothing to restore: {where}. Name the root that the checkpoints are in, or start "
            'anew with required=False or resume="auto"'
        )
    if ranks.rank == 0:
        logger.warning("nothing restored, a FRESH START: %s", where)


def describe_empty(root: Folder) -> str:
    """Describe a root in which no committed checkpoint was found: what is there instead, and which
    folders beside it have a similar name.
    """
    names = [name for name in root.names() if name != FOLDER]
    neighbours = _neighbours(root)
    begun = [name for name in names if sequence_of(name) is not None]
    if begun:
        found = f"{root} holds {len(begun)} checkpoint(s) that were begun, none committed"
    elif names:
        shown = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
        found = f"{root} holds no checkpoint, but {shown}"
    elif root.name in neighbours:
        found = f"{root} is empty"
    else:
        found = f"{root} does not exist"
    matches = difflib.get_close_matches(root.name, neighbours, _MOST_NAMED, cutoff=0.75)
    similar = [name for name in matches if name != root.name]
    return f"{found} (beside it: {', '.join(similar)})" if similar else found


def protect_existing(root: Folder, ranks: Ranks, writer: RootWriter) -> None:
    """Keep the newest chain of a root in which a run starts anew from being deleted, and tell of
    it; a collective.
    """

    def protect() -> str:
        try:
            chain, _ = newest(root)
        except (CheckNRunError, OSError) as error:
            return f"what is in {root} can't be read: {error}"
        if chain is None:
            return describe_empty(root)
        writer.restored(chain)
        return (
            f"{root} holds checkpoints up to {chain.head.id} (step {chain.head.step}), which this "
            "run leaves behind as a fork; that chain is not deleted"
        )

    where = ranks.from_rank_0(protect)
    if ranks.rank == 0:
        logger.warning("nothing restored, a FRESH START, since resume is 'never': %s", where)


def _neighbours(root: Folder) -> list[str]:
    """List what is beside the root, itself included; nothing where that can't be listed."""
    try:
        return root.parent.names()
    except (CheckNRunError, OSError):
        return []
