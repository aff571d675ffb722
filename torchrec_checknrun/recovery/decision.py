"""Decide whether images of a run that has died can be used, by what the storage holds.

A checkpoint may be newer than images, or of another lineage; and a root that was emptied, or is
another run's, has nothing to do with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrec_checknrun.format.losses import merged
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.memory.agreement import Decision, Found, Newest, decide
from torchrec_checknrun.memory.partial import decide_partial, lost_ranks
from torchrec_checknrun.options.options import Options
from torchrec_checknrun.recovery.partial_recovery import unruled
from torchrec_checknrun.root.chain import Chain, newest
from torchrec_checknrun.root.retention import original_of
from torchrec_checknrun.writers.claims import read_claims


def decide_by_storage(
    found: list[Found], options: Options
) -> tuple[Decision, Chain | None, list[str]]:
    """Decide on the step to go back to, by all ranks' images and what the storage holds.

    Returns:
        The decision, the newest chain and why newer checkpoints are not used; neither of these
        where images are out of the question anyway.

    Raises:
        ClaimDamaged, StorageFailed: the newest checkpoint is unknown.
    """
    gone = [image.missing is not None for image in found]
    partial_recovery = options.partial
    if all(gone) or (any(gone) and partial_recovery is None):
        return decide(found, Newest()), None, []  # the storage need not be asked
    chain, problems = newest(options.root, resumes=True)
    if chain is None and problems:
        reason = f"the storage holds no whole checkpoint: {'; '.join(problems)}"
        return Decision(None, (reason,)), None, problems
    if chain is None and not read_claims(options.root).highest:
        # A run claims its root at its first step: this one was emptied, or is another's.
        reason = f"no run has claimed {options.root}: the images are not of what is there"
        return Decision(None, (reason,)), None, problems
    head = Newest() if chain is None else _newest(chain.head, found)
    known = () if chain is None else chain.head.losses
    if partial_recovery is None:
        decision = decide(found, head)
        losses = merged(known, *(image.losses for image in found))
        return replace(decision, losses=losses), chain, problems
    why_not = unruled(options, lost_rank_0=0 in lost_ranks(found, head))
    return decide_partial(found, head, partial_recovery, why_not, known), chain, problems


def _newest(head: Manifest, found: Sequence[Found]) -> Newest:
    """Return the newest checkpoint, by the id that images know it by: its own, or, of a compacted
    copy that they don't descend from, that of the original.
    """
    known = any(head.id in image.heads for image in found)
    return Newest(head.id if known else original_of(head), head.step)
