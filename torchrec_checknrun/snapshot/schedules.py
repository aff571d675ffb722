"""Notice learning rate schedulers that no state object is or holds: they begin anew at a restore.

To look for all that follows an optimizer takes as long as a garbage collection. So it is done when
a Checkpointer is made and at its first step or save, and later only where rates have moved that no
scheduler among the state objects has set: a program may make one after the Checkpointer, or put one
in another's place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.optim import Optimizer

from torchrec_checknrun.dense.optimizers import held_schedules, unsaved_schedules
from torchrec_checknrun.dense.tree import all_nodes

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


class Schedules:
    """The schedulers of torch's that follow an optimizer among state objects.

    Args:
        states: state objects by name.
    """

    def __init__(self, states: Mapping[str, object]) -> None:
        self._states = states
        self._told: set[tuple[str, str]] = set()
        self._rates: dict[int, list[float]] | None = None
        """As of the last save; None before the first."""
        self.tell()

    def tell(self) -> None:
        """Warn, once for each, of schedulers that are not among the state objects."""
        for schedule, optimizer in sorted(unsaved_schedules(self._states.values()) - self._told):
            self._told.add((schedule, optimizer))
            logger.warning(
                "a learning rate scheduler, a %s, follows the %s, and no state object is or holds "
                "it: unless another one saves it, a restored run begins the schedule anew, and "
                'sets other rates. Give it: state={"schedule": scheduler}',
                schedule,
                optimizer,
            )

    def look(self) -> None:
        """Warn, at a save, of schedulers that have moved rates since the last look."""
        before, self._rates = self._rates, self._present()
        if before is None:
            return
        moved = [rates for key, rates in self._rates.items() if rates != before.get(key)]
        if not {rate for rates in moved for rate in rates} <= self._set():
            self.tell()

    def _present(self) -> dict[int, list[float]]:
        """Return the rates of the optimizers' groups, by the optimizers' ``id``."""
        return {
            id(node.optimizer): list(_numbers(g.get("lr") for g in node.optimizer.param_groups))
            for state in self._states.values()
            for node in (all_nodes(state) if isinstance(state, Optimizer) else ())
        }

    def _set(self) -> set[float]:
        """Return the rates that schedulers among the state objects have set."""
        held = held_schedules(self._states.values())
        return {rate for each in held for rate in _numbers(getattr(each, "_last_lr", ()))}


def _numbers(rates: Iterable[object]) -> Iterator[float]:
    """Yield rates as numbers, but for those of optimizers that choose one themselves (None)."""
    for rate in rates:
        if isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.numel() == 1):
            yield float(rate)
