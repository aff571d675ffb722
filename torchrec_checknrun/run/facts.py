"""Name what each rank says when a checkpoint is due, and what rank 0's decision leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchrec_checknrun.errors import CheckNRunError, SaveDeferred, SaveFailed
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.root.lineage import Proposal
from torchrec_checknrun.run.compaction import Copied

_MANY = 8
"""Times in a row that a checkpoint is put off until a warning asks for a change."""


@dataclass(frozen=True)
class Facts:
    """One rank's report when a checkpoint is due."""

    step: int
    waiting: bool
    """True if gradients wait for their optimizer."""
    busy: bool
    """True if a checkpoint or a publication is still being written."""
    hangs: bool
    """True if a checkpoint was given up and its thread has not returned yet."""
    failed: bool
    """True if the last checkpoint was not committed and the caller has not been told yet."""
    modified: bool
    """True if rows were marked since the last checkpoint, or may have been."""
    proposal: Proposal | None
    """Rank 0's proposal of the next checkpoint; None on other ranks."""
    committed: bool
    """True if rank 0 has found that this step is committed already and can be restored."""
    references: str | None
    """The checkpoint, by checksum, that this rank's next one can be a link to; None: it must be a
    base.
    """
    full: bool = False
    """True if this rank's rows can't build on earlier checkpoints."""
    copied: Copied | None = None
    """The outcome of a compaction behind training, on rank 0; None: nothing new."""
    publishing: bool = False
    """True if a publication is still being written."""
    parted: bool = False
    """True if the background can't reach the other ranks from this one any more."""


class Begun(Enum):
    """The outcome of the attempt to begin a checkpoint, the same on all ranks."""

    YES = "the checkpoint is on its way"
    DEFERRED = "gradients wait for their optimizer"
    BUSY = "another checkpoint is still being written"
    FAILED = "the previous checkpoint failed, or the storage did: see ``Outcomes.raise_failure``"
    UNCHANGED = "the last checkpoint, of the same step, holds everything"


class PutOff:
    """The times in a row that a checkpoint was put off, since gradients waited."""

    def __init__(self) -> None:
        self._times = 0

    def end(self) -> None:
        """Hear that a checkpoint was not put off."""
        self._times = 0

    def again(self, step: int, names: Sequence[str]) -> str | None:
        """Return what to log of one more time: the first, the second, the fourth, the eighth …

        Args:
            names: of parameters whose gradients wait on this rank.
        """
        self._times += 1
        if self._times & (self._times - 1):
            return None
        which = f" of {listed(names)}" if names else ""
        message = (
            f"gradients{which} wait for their optimizer: the checkpoint of step {step} is put off "
            "until its step() applies them, or zero_grad() drops them"
        )
        if self._times >= _MANY:
            message += (
                f". So it was {self._times} times in a row: where that does not end there are no "
                "checkpoints, nor images of these steps. Call the Checkpointer's step() after the "
                "optimizers', and let those that step in turns meet at one step now and then"
            )
        return message


def require_one_step(facts: Sequence[Facts]) -> None:
    """Raise SaveFailed where ranks are at different steps, naming these."""
    steps = [fact.step for fact in facts]
    if len(set(steps)) > 1:
        raise SaveFailed(
            f"the ranks are at different steps {steps}: call step() or save() on all ranks at "
            "the same point of the training loop"
        )


def not_begun(begun: Begun, step: int) -> CheckNRunError | None:
    """Return the error for the caller of an explicit save that was not begun; None if it was."""
    if begun is Begun.FAILED:
        return SaveFailed(
            f"step {step} was not saved: on another rank the previous checkpoint was not "
            "committed. Its rows are kept for the next one; save again"
        )
    if begun is Begun.DEFERRED:
        return SaveDeferred(
            f"step {step} was not saved: gradients wait for their optimizer, and a checkpoint "
            "would lose them. Call the optimizer's step(), or zero_grad() to drop them, and save "
            "again; step() saves by itself as soon as none waits"
        )
    return None


def not_begun_at_the_end(step: int) -> SaveFailed:
    """Return the error for a run that ends while gradients wait: no step comes to save after."""
    return SaveFailed(
        f"the last checkpoint, of step {step}, was not made: gradients wait for their optimizer. "
        "Call its step() or zero_grad() before close()"
    )
