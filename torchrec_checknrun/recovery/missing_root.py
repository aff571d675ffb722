"""Report what a root without a usable checkpoint holds.

A typo in a root must not start training fresh unnoticed, and a run that starts fresh on purpose
must not delete what is there.
"""

from __future__ import annotations

import logging

from torchrec_checknrun.errors import (
    CheckNRunError,
    CheckpointNotFound,
    RootInUse,
    UnsupportedFormat,
)
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.chain import Chain, newest
from torchrec_checknrun.root.checkpoints import committed, describe_empty, has_manifest
from torchrec_checknrun.root.shared_root import require_nowhere
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.store.folder import Folder

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


def start_fresh(root: Folder, ranks: Ranks, *, required: bool) -> None:
    """Warn that no checkpoint was found, and where; a collective.

    Raises:
        CheckpointNotFound: a checkpoint is required.
        RootNotShared: other ranks see a checkpoint.
        RootInUse: a checkpoint was committed meanwhile.
    """
    require_nowhere(root, ranks)
    where = ranks.from_rank_0(lambda: _describe_uncommitted(root))
    if required:
        raise CheckpointNotFound(
            f"nothing to restore: {where}. Name the root that the checkpoints are in, or start "
            'fresh with required=False or resume="auto"'
        )
    if ranks.rank == 0:
        logger.warning("nothing restored, a FRESH START: %s", where)


def protect_existing(root: Folder, ranks: Ranks, writer: RootWriter) -> None:
    """Protect the newest chain of a root in which a run starts fresh, and report it; a collective.

    Raises:
        StorageFailed: the storage can't be read: nothing could be protected.
    """

    def protect() -> str:
        try:
            chain, problems = _newest(root)
            writer.leave_behind(chain)
        except CheckNRunError as error:
            return f"the checkpoints in {root} can't be read: {error}"
        if chain is not None:
            return _abandons(root, chain)
        if problems:
            return f"{root} holds checkpoints, but none can be restored: {'; '.join(problems)}"
        return describe_empty(root)

    where = ranks.from_rank_0(protect)
    if ranks.rank == 0:
        logger.warning("nothing restored, a FRESH START, since resume is 'never': %s", where)


def protect_unasked(root: Folder, writer: RootWriter) -> str | None:
    """Protect the newest chain of a root in which a run saves that has restored nothing: it may
    have forgotten to, or have the wrong root. For rank 0.

    Returns:
        A warning; None where a restore has decided, or the root holds no complete chain.

    Raises:
        ClaimDamaged, StorageFailed: the root can't be read.
    """
    if writer.settled:
        return None
    chain, _ = _newest(root)
    writer.leave_behind(chain)
    return None if chain is None else f"nothing was restored: {_abandons(root, chain)}"


def _newest(root: Folder) -> tuple[Chain | None, list[str]]:
    """Return the newest chain that this release can read, and problems of newer ones."""
    try:
        return newest(root, resumes=True)
    except UnsupportedFormat:  # of a newer release; beside it nothing is deleted
        return newest(root)


def _abandons(root: Folder, chain: Chain) -> str:
    """Describe the chain that a fresh start leaves behind."""
    id = chain.head.id
    return (
        f"{root} holds checkpoints up to {id} (step {chain.head.step}), which this run abandons as "
        f"a fork. It does not delete that chain; a later run will, unless you keep it with "
        f"`checknrun pin {root} {id}`"
    )


def _describe_uncommitted(root: Folder) -> str:
    """Describe the content of a root that holds no checkpoint.

    Raises:
        RootInUse: a checkpoint was committed there just now.
    """
    if any(has_manifest(root, name) for name in committed(root)):
        raise RootInUse(
            f"a checkpoint was committed to {root} by another process when nothing was found to "
            "restore: give this run a root of its own; or, if that process has ended, start again"
        )
    return describe_empty(root)
