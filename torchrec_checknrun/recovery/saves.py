"""Define what a recovery asks of the saves of a run, and tells them: they are above this room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.lineage import Lineage


class Saves(Protocol):
    """The saves of a run.

    Attributes:
        lineage: the checkpoints that were committed or restored last.
        publishing: tells whether a publication is on its way.
    """

    lineage: Lineage
    publishing: Callable[[], bool]

    @property
    def running(self) -> object | None:
        """Return the checkpoint that was begun and whose outcome was not noted yet."""

    @property
    def claimed(self) -> bool:
        """Return whether the root was claimed, on all ranks alike: until then it may be another
        run's.
        """

    @property
    def gradients_wait(self) -> bool:
        """Return whether gradients wait on this rank for an optimizer's step."""

    def recovered(
        self,
        chain: Chain | None,
        lineage: str,
        lossy: int,
        full: bool,
        losses: tuple[Loss, ...] = (),
        passed_over: Sequence[str] = (),
    ) -> None:
        """Note that the model is in a later state than a chain's head, from which it descends.

        Args:
            lineage: the name of the lineage.
            lossy: restores from lossy checkpoints so far, this one being none.
            full: whether the next checkpoint must be full.
            losses: what partial recoveries have cost so far.
            passed_over: newer checkpoints that can't be used, each with the reason.
        """

    def log(self, message: str, *values: object, level: int = logging.INFO) -> None:
        """Log a message once for all ranks."""
