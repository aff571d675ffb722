"""What each rank says when a checkpoint is due; rank 0 decides on all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_checknrun.root.lineage import Proposal


@dataclass(frozen=True)
class Facts:
    """What a rank says when a checkpoint is due."""

    step: int
    waiting: bool
    """Gradients wait for their optimizer."""
    busy: bool
    """A checkpoint is still being written."""
    hangs: bool
    """One was given up, and its thread has not come back yet."""
    failed: bool
    """The last one was not committed, and the caller doesn't know yet."""
    modified: bool
    """Rows were marked since the last one, or may have been."""
    proposal: Proposal | None
    """Rank 0's."""
    committed: bool
    """Rank 0 has found that this step is committed already and can be restored."""
