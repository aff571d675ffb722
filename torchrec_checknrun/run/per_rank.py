"""How state objects, and a model's buffers, are declared to be on several ranks."""

from __future__ import annotations

from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.restore.plan import Merge


class PerRank:
    """Declares that a state object differs between ranks: each rank's own is saved.

    Attributes:
        state: the object.
        merge: makes one rank's state dict of the list of all that were saved, in rank order; needed
            only to restore on another number of ranks, which is an error without it.
    """

    # No dataclass: hydra.utils.instantiate would make a config of it.
    def __init__(self, state: Stateful, merge: Merge | None = None) -> None:
        self.state = state
        self.merge = merge


class Replicated:
    """Declares that rank 0's content of a state object is right for all ranks: only that is saved,
    and the ranks' contents are not compared.

    Attributes:
        state: the object.
    """

    def __init__(self, state: Stateful) -> None:
        self.state = state
