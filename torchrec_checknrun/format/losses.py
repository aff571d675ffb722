"""Record what partial recoveries have lost: the ledger that images and manifests keep.

The portion of lost samples (PLS) is CPR's measure (MLSys'21, section 4): each failure adds, for
each rank whose rows went back to a checkpoint, the samples since that checkpoint over all samples
of the job, divided by the number of ranks that hold tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from torchrec_checknrun.format.checks import Count, Record
from torchrec_checknrun.values.limits import LARGEST

MOST = 256
"""The most losses of one lineage: a ledger is written with every checkpoint."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST)]


class Loss(Record, frozen=True):
    """The cost of one failure to one rank.

    Attributes:
        rank: the rank whose rows went back.
        since: the step of the checkpoint that its rows were read from.
        step: the step at which all ranks went on.
        ranks: the number of ranks that held rows of tables.
        total_steps: the steps of the whole job, as known then.
    """

    rank: Count
    since: Count
    step: Count
    ranks: Positive
    total_steps: Positive

    @property
    def portion(self) -> float:
        """Return the portion of lost samples."""
        return max(0, self.step - self.since) / (self.total_steps * self.ranks)


def portion(losses: Iterable[Loss]) -> float:
    """Return the portion of lost samples (PLS) of a ledger."""
    return sum(loss.portion for loss in losses)


def merged(*ledgers: Iterable[Loss]) -> tuple[Loss, ...]:
    """Merge ledgers; of one rank at one step the last loss counts.

    A recovery that is killed and repeated is of the same step: nothing was trained in between, and
    its loss counts once.
    """
    found = {(loss.step, loss.rank): loss for ledger in ledgers for loss in ledger}
    return tuple(found[key] for key in sorted(found))
