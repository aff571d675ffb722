"""Decide on a partial recovery: only ranks whose images are gone go back to a checkpoint.

The others keep their newer rows (CPR, MLSys'21). That loses samples of the lost ranks' rows, so it
is done only within a budget, and only where all other state of a lost rank can be had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_checknrun.format.losses import MOST, Loss, merged, portion
from torchrec_checknrun.memory.agreement import Decision, Found, Newest, decide, refusal


@dataclass(frozen=True)
class PeerCopies:
    """Keep a copy of each rank's checkpoint files in the shared memory of another rank, on another
    machine where there is one: what is encoded for a checkpoint is sent there as well. A rank whose
    image is gone then reads no rows from the storage.

    Attributes:
        most_bytes: the most that a rank holds for others: the baseline and chain of its neighbour.
            What would exceed it is dropped until the next full checkpoint, and the log says so.
            None: twice what the largest rank's part of the model takes.
    """

    most_bytes: int | None = None

    def __post_init__(self) -> None:
        most = self.most_bytes
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(
                "peers: most_bytes must be a number of bytes such as 8 << 30, or None, not "
                f"{most!r}"
            )


PRIORITIES = ("growth", "updates", "sampled", "change")


@dataclass(frozen=True)
class PrioritySaves:
    """Save rows between checkpoints that a lost rank takes in place of the checkpoint's older ones.

    Of a shard of which more than ``fraction`` was modified since the last save, so many rows are
    saved, those that matter most; of any other all that were modified. Only partial recoveries
    read them.

    Attributes:
        every_steps: from one save to the next.
        fraction: most rows of a shard in one save.
        by: what matters: ``growth`` of the row-wise Adagrad sum (other optimizers: ``updates``),
            ``updates`` (MFU), a ``sampled`` list of them (SSU), or the ``change`` of values (SCAR).
    """

    every_steps: int
    fraction: float = 0.02
    by: str = "growth"

    def __post_init__(self) -> None:
        steps, part = self.every_steps, self.fraction
        if type(steps) is not int or steps < 1:
            raise ValueError(
                f"priority: every_steps must be a number of steps such as 100, not {steps!r}"
            )
        if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
            raise ValueError(
                f"priority: fraction must be a part of the rows such as 0.02, not {part!r}"
            )
        if self.by not in PRIORITIES:
            raise ValueError(f"priority: by must be one of {PRIORITIES}, not {self.by!r}")


@dataclass(frozen=True)
class PartialRecovery:
    """Let ranks whose images are gone (a lost machine, a deleted file) go on with the rows of the
    newest checkpoint, while all others keep theirs. A run that was recovered so can't be repeated
    bit for bit; its checkpoints and reports say so.

    Attributes:
        max_pls: the portion of lost samples that the whole run may lose so, in all failures: 0.01
            for one in a hundred. A failure that would exceed it sends all ranks back.
        total_steps: the steps of the whole run, of which these are a portion.
        peers: ``PeerCopies()`` keeps a copy of each rank's checkpoint files in another rank's
            memory, from which a lost rank reads its rows; None: it reads them from the storage.
        priority: ``PrioritySaves(…)`` saves some rows between checkpoints for lost ranks; None:
            there are none.
    """

    max_pls: float
    total_steps: int
    peers: PeerCopies | None = None
    priority: PrioritySaves | None = None

    def __post_init__(self) -> None:
        most, steps = self.max_pls, self.total_steps
        if isinstance(most, bool) or not isinstance(most, (int, float)) or not 0 <= most <= 1:
            raise ValueError(
                f"partial: max_pls must be a portion from 0 to 1, such as 0.01, not {most!r}"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(
                "partial: total_steps must be the number of steps of the whole run, such as "
                f"100_000, not {steps!r}"
            )
        peers: object = self.peers
        if peers is not None and not isinstance(peers, PeerCopies):
            raise ValueError(f"partial: peers must be PeerCopies() or None, not {peers!r}")
        priority: object = self.priority
        if priority is not None and not isinstance(priority, PrioritySaves):
            raise ValueError(
                f"partial: priority must be PrioritySaves(every_steps=…) or None, not {priority!r}"
            )


def lost_ranks(found: Sequence[Found], newest: Newest) -> list[int]:
    """Return the ranks that have no image to go on by.

    Beside missing images that is those of another incarnation than most, those that do not descend
    from the newest checkpoint, and those older than it: they were left behind on a machine that the
    rank has come back to.
    """
    usable = {
        rank: image
        for rank, image in enumerate(found)
        if image.missing is None and newest.id in image.heads and image.done >= newest.step
    }
    counts = Counter(image.incarnation for image in usable.values()).most_common(2)
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        return []  # none is to be preferred: ``decide`` refuses them all
    most = counts[0][0] if counts else ""
    return [
        rank for rank in range(len(found)) if rank not in usable or usable[rank].incarnation != most
    ]


def decide_partial(
    found: Sequence[Found],
    newest: Newest,
    partial: PartialRecovery,
    unruled: Sequence[str],
    known: Sequence[Loss] = (),
) -> Decision:
    """Decide by all ranks' images, some of which are gone.

    Args:
        newest: the checkpoint that the lost ranks' rows would be read from.
        unruled: why other state of a lost rank can't be had, whichever rank it is.
        known: what the newest checkpoint knows of earlier losses.

    Returns:
        The step and the lost ranks, or why all ranks must go back.
    """
    lost = lost_ranks(found, newest)
    by_reason: dict[str, list[int]] = {}
    for rank in lost:
        image = found[rank]
        what = image.missing or f"its image of step {image.done} was left behind"
        by_reason.setdefault(what, []).append(rank)
    if len(lost) == len(found):
        return refusal(by_reason)
    survivors = [image for rank, image in enumerate(found) if rank not in lost]
    decision = decide(found, newest, frozenset(lost))
    ledger = merged(known, *(image.losses for image in survivors))
    if decision.step is None or not lost:
        return Decision(decision.step, decision.reasons, losses=ledger)
    why = list(unruled)
    if newest.id is None:
        why.insert(0, "no checkpoint is there, which could have the lost ranks' rows")
    holders = [rank for rank, image in enumerate(found) if image.holds_rows]
    new = [
        Loss(rank, newest.step, decision.step, len(holders), partial.total_steps)
        for rank in lost
        if rank in holders
    ]
    after = merged(ledger, new)
    if portion(after) > partial.max_pls:
        why.append(
            f"the portion of lost samples would be {portion(after):.3g}, and before it was "
            f"{portion(ledger):.3g}: more than max_pls={partial.max_pls:g}"
        )
    elif len(after) > MOST:
        why.append(f"there were {MOST} losses before")
    if why:
        refused = refusal(by_reason).reasons
        return Decision(None, (*refused, *(f"all ranks must go back: {each}" for each in why)))
    return Decision(decision.step, lost=tuple(lost), losses=after, is_new=after != ledger)
