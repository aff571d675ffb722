"""Agree on the step that all ranks can go back to, or on why there is none.

Each rank says what its image can do; rank 0 alone looks at the storage and decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.ranks import ranks_text


@dataclass(frozen=True)
class Found:
    """One rank's image at a start.

    Attributes:
        missing: why there is none that can be used; None: there is one.
        incarnation: names the images that were begun together.
        done: the newest step whose end is in the image.
        steps: the steps whose end can be gone back to.
        heads: ids of checkpoints that the image may descend from: the last one known to be
            committed (None: none was), and those begun since.
        ahead: of these, each with the last step that it may hold more than the end of.
        holds_rows: whether the rank has rows of sharded tables, image or not.
        losses: what partial recoveries have cost so far.
    """

    missing: str | None = None
    incarnation: str = ""
    done: int = -1
    steps: tuple[int, ...] = ()
    heads: tuple[str | None, ...] = ()
    ahead: tuple[tuple[str | None, int], ...] = ()
    holds_rows: bool = True
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True)
class Newest:
    """The checkpoint that an ordinary restore would take; ``id`` is None without one."""

    id: str | None = None
    step: int = 0


@dataclass(frozen=True)
class Decision:
    """The step to go back to, by images.

    Attributes:
        step: None: not by images.
        reasons: why not, for each rank concerned.
        lost: the ranks that have no image to go back by; their rows come from the newest
            checkpoint.
        losses: what partial recoveries have cost, this one included.
        is_new: whether this one costs anything that no image and no checkpoint knew of.
    """

    step: int | None
    reasons: tuple[str, ...] = ()
    lost: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()
    is_new: bool = False


def decide(
    found: Sequence[Found], newest: Newest, lost: AbstractSet[int] = frozenset()
) -> Decision:
    """Decide by the ranks' images, in rank order.

    The newest step that all can reach is the oldest one that is the newest of a rank. An image
    counts only if it descends from the checkpoint that a restore would take: else the storage has
    gone on without it.

    Args:
        lost: ranks that do without their image; there must be others.
    """
    by_reason: dict[str, list[int]] = {}
    images = {rank: image for rank, image in enumerate(found) if rank not in lost}
    for rank, image in images.items():
        if image.missing is not None:
            by_reason.setdefault(image.missing, []).append(rank)
    if by_reason:
        return refusal(by_reason)
    incarnations = {image.incarnation for image in images.values()}
    if len(incarnations) > 1:
        return Decision(None, ("the ranks' images were not begun together",))
    step = min(image.done for image in images.values())
    for rank, image in images.items():
        if step not in image.steps:
            what = f"it can go back to steps {sorted(image.steps)}, and the ranks need {step}"
            by_reason.setdefault(what, []).append(rank)
        elif newest.id not in image.heads:
            which = "no checkpoint is there" if newest.id is None else f"{newest.id} is the newest"
            what = f"{which}, from which it does not descend"
            by_reason.setdefault(what, []).append(rank)
        elif step < newest.step:
            what = f"it is of step {step}, older than {newest.id} of step {newest.step}"
            by_reason.setdefault(what, []).append(rank)
        elif step <= dict(image.ahead).get(newest.id, -1):
            what = f"{newest.id} holds what was changed after the end of step {step}"
            by_reason.setdefault(what, []).append(rank)
    return refusal(by_reason) if by_reason else Decision(step)


def refusal(by_reason: dict[str, list[int]]) -> Decision:
    """Return a decision against images, for these reasons of these ranks."""
    return Decision(None, tuple(f"{ranks_text(on)}: {reason}" for reason, on in by_reason.items()))
