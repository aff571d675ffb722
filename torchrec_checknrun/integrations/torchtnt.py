"""Checkpoint a TorchRec model that TorchTNT's loops train.

Needs TorchTNT 0.2.4, which itself needs ``setuptools<81``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.integrations.rng import RngState
from torchrec_checknrun.root.report import RestoreReport
from torchrec_checknrun.run.checkpointer import Checkpointer

try:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.callback import Callback
except ImportError as error:
    raise ImportError(
        f"torchrec_checknrun.integrations.torchtnt needs TorchTNT ({error}): "
        "pip install 'torchrec_checknrun[torchtnt]'"
    ) from error

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torchtnt.framework.state import State
    from torchtnt.framework.unit import TTrainUnit


class CheckNRun(Callback):
    """A callback that restores before the first batch and saves while ``train`` or ``fit`` trains.

    Everything that the unit tracks is saved and restored: optimizers, learning rate schedulers,
    progress, modules and other Stateful attributes (``app_state()``). Give it as the last callback:
    what others behind it do at a step's end comes after the save. An ``AutoUnit`` reads a batch
    ahead of training, which a warning tells where a reader is saved.

    Args:
        root: as of ``Checkpointer``.
        model: name of the unit's module that is saved; its tables must be sharded
            (``DistributedModelParallel``).
        state: more state objects, as of ``Checkpointer``; or the unit's own once more, declared
            (``PerRank``), under the same name.
        options: all else that ``Checkpointer`` takes, such as ``every_steps=1000``.

    Attributes:
        checkpointer: in use from the beginning of training to its end; None otherwise.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: str = "module",
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._root, self._model, self._state = root, model, dict(state or {})
        self._options = options
        self.checkpointer: Checkpointer | None = None

    def states(self, unit: TTrainUnit) -> dict[str, Any]:
        """Return the state objects by name; override to choose others."""
        model: nn.Module = getattr(unit, self._model)
        own = {
            name: item
            for name, item in unit.app_state().items()
            if isinstance(item, Stateful) and not _is_saved_with(item, model)
        }
        return {**own, **self._state}

    def restore(self, checkpointer: Checkpointer) -> RestoreReport | None:
        """Restore the run; override to name a checkpoint, or with ``strict=False`` and the like."""
        return checkpointer.restore()

    def on_train_start(self, state: State, unit: TTrainUnit) -> None:
        """Make the Checkpointer and restore."""
        model: nn.Module = getattr(unit, self._model)
        states = self.states(unit)
        self._warn_of_readers(unit)
        self.checkpointer = Checkpointer(self._root, model=model, state=states, **self._options)
        self.restore(self.checkpointer)

    def on_train_step_end(self, state: State, unit: TTrainUnit) -> None:
        """Count a step; save if that is due."""
        assert self.checkpointer is not None
        self.checkpointer.step()

    def on_train_end(self, state: State, unit: TTrainUnit) -> None:
        """Wait for the last checkpoint."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def on_exception(self, state: State, unit: TTrainUnit, exc: BaseException) -> None:
        """Stop without waiting for other ranks, which may never come."""
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exc), exc, exc.__traceback__)
            self.checkpointer = None

    def _warn_of_readers(self, unit: TTrainUnit) -> None:
        """Warn of readers whose place is ahead of training, since the unit reads ahead."""
        ahead = AutoUnit.get_next_train_batch
        if not isinstance(unit, AutoUnit) or type(unit).get_next_train_batch is not ahead:
            return
        given = {**unit.tracked_misc_statefuls(), **self._state}
        known = (GradScaler, RngState)
        if readers := [name for name, state in given.items() if not isinstance(state, known)]:
            logger.warning(
                "%s reads a batch ahead of training: a reader or loader among the state objects "
                "(%s) would skip that batch after each restore. Where one of them is, override "
                "get_next_train_batch(self, state, data_iter) by return "
                "self.move_data_to_device(state, next(data_iter), non_blocking=False)",
                type(unit).__name__,
                ", ".join(map(repr, readers)),
            )


def _is_saved_with(item: object, model: nn.Module) -> bool:
    """Return whether a unit's attribute is the model, one of its parts, or around it."""
    if not isinstance(item, nn.Module):
        return False
    return any(item is part for part in model.modules()) or any(
        model is part for part in item.modules()
    )
