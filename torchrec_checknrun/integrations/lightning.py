"""Checkpoint a TorchRec model that Lightning's Trainer trains.

Needs Lightning (``lightning`` or ``pytorch_lightning``, 2.2 or newer).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrec_checknrun.options.arguments import PerRank
from torchrec_checknrun.root.report import RestoreReport
from torchrec_checknrun.run.checkpointer import Checkpointer
from torchrec_checknrun.schedule.triggers import OnSigterm

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningDataModule, LightningModule
    except ImportError as error:
        raise ImportError(
            f"torchrec_checknrun.integrations.lightning needs Lightning ({error}): "
            "pip install 'torchrec_checknrun[lightning]'"
        ) from error

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CheckNRun(Callback):
    """A callback that restores before the first batch and saves while the Trainer trains.

    The model's tables must be sharded (``DistributedModelParallel``) when ``fit`` begins, and the
    strategy must leave the module as it is (no DDP around it). Optimizers, learning rate
    schedulers, the Trainer's progress (epoch, batch, step), its other callbacks' states and its
    precision plugin's are saved and restored as well; the position in the data is not: give a
    reader that knows its place in ``state``, and a length, without which Lightning reads ahead of
    training. A step ends after ``on_train_batch_end`` of all callbacks and of the module. With the
    Trainer's ``fast_dev_run`` nothing is restored or saved, as by Lightning's own callbacks.

    Args:
        root: as of ``Checkpointer``.
        model: name of the LightningModule's attribute that is saved; None: the whole module.
        state: more state objects, as of ``Checkpointer``.
        options: all else that ``Checkpointer`` takes, such as ``every_steps=1000``; a step is a
            batch, also where gradients are accumulated over several.

    Attributes:
        checkpointer: in use from the beginning of ``fit`` to its end; None otherwise.

    Raises:
        ValueError: ``OnSigterm`` is among the triggers: Lightning's own handler replaces this one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: str | None = None,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if any(isinstance(trigger, OnSigterm) for trigger in options.get("triggers", ())):
            raise ValueError(
                "triggers must not hold OnSigterm: Lightning handles SIGTERM itself; save often "
                "enough with every_steps or EverySeconds instead"
            )
        self._root, self._model, self._state = root, model, dict(state or {})
        self._options = options
        self.checkpointer: Checkpointer | None = None
        self._hooked: LightningModule | None = None

    def states(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """Return the state objects by name; override to add some that exist only now."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return {
            **{f"optimizer_{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)},
            **{f"scheduler_{i}": scheduler for i, scheduler in enumerate(schedulers)},
            "progress": _Progress(trainer),
            "callbacks": PerRank(_Callbacks(trainer, self), merge=_first, lost="copy"),
            "precision": PerRank(trainer.precision_plugin, merge=_first, lost="copy"),
            **self._state,
        }

    def restore(self, checkpointer: Checkpointer) -> RestoreReport | None:
        """Restore the run; override to name a checkpoint, or with ``strict=False`` and the like."""
        return checkpointer.restore()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the Checkpointer and restore; not for a run that tries a few batches out."""
        if trainer.fast_dev_run:
            logger.warning("nothing is restored or saved: the Trainer has fast_dev_run")
            return
        model: nn.Module = getattr(pl_module, self._model) if self._model else pl_module
        self.checkpointer = Checkpointer(
            self._root, model=model, state=self.states(trainer, pl_module), **self._options
        )
        if self.restore(self.checkpointer) is not None:
            _warn_of_plateaus(trainer)
        _warn_of_hooks(trainer, pl_module)
        self._end_steps_of(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if Lightning reads ahead of training."""
        fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
        ahead = getattr(fetcher, "prefetch_batches", 0)
        if self._state and ahead and getattr(fetcher, "length", 0) is None:
            logger.warning(
                "the training data has no length, so Lightning reads %d batch ahead: a reader "
                "among the state objects (%s) would skip as many batches after a restore; give "
                "the data a __len__",
                ahead,
                ", ".join(map(repr, self._state)),
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last checkpoint."""
        self._unhook()
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End as after training: of a run that is over already Lightning trains nothing."""
        self.on_train_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop without waiting for other ranks, which may never come."""
        self._unhook()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(exception), exception, exception.__traceback__)
            self.checkpointer = None

    def _end_steps_of(self, module: LightningModule) -> None:
        """Count a step, and save if that is due, after the module's own hook of a batch's end.

        Lightning calls that hook after those of all callbacks. What any of them changes, such as
        averages of weights, belongs to the step.
        """
        hook = module.on_train_batch_end

        @wraps(hook)
        def end_step(*args: Any, **kwargs: Any) -> None:
            hook(*args, **kwargs)
            assert self.checkpointer is not None
            self.checkpointer.step()

        self._hooked = module
        vars(module)["on_train_batch_end"] = end_step

    def _unhook(self) -> None:
        if self._hooked is not None:
            vars(self._hooked).pop("on_train_batch_end", None)
            self._hooked = None


def _warn_of_plateaus(trainer: Trainer) -> None:
    """Warn of schedules that Lightning does not step for the batch that a run resumes after."""
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if config.reduce_on_plateau and config.interval == "epoch":
            logger.warning(
                "Lightning does not step %s at the end of the epoch that a run resumes in, nor "
                "validates again after a checkpoint of an epoch's last batch: rates may come down "
                "later than without the stop; use a schedule that waits for no metric if they must "
                "not",
                name,
            )
        elif config.reduce_on_plateau:
            logger.warning(
                "Lightning steps %s after a batch's last hook, and so after the checkpoint: the "
                "step for the batch that this run resumes after is left out, and rates may come "
                "down later than without the stop; step it in training_step (manual optimization), "
                "or use a schedule that waits for no metric, if they must not",
                name,
            )


def _warn_of_hooks(trainer: Trainer, module: LightningModule) -> None:
    """Warn of what would be part of Lightning's own checkpoints by hooks, and is not saved here."""
    parts = [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
    found = [
        f"{type(part).__name__}.on_save_checkpoint"
        for part, kind in parts
        if type(part).on_save_checkpoint is not kind.on_save_checkpoint
    ]
    data = trainer.datamodule
    if data is not None and type(data).state_dict is not LightningDataModule.state_dict:
        found.append(f"{type(data).__name__}.state_dict")
    if found:
        logger.warning(
            "what %s would add to Lightning's checkpoints is not saved here, and begins anew in a "
            "restored run: give what holds it in state (PerRank, if each rank has its own)",
            ", ".join(found),
        )


def _first(states: list[Any]) -> Any:
    """Return rank 0's state for other ranks than those that saved, as Lightning does."""
    return states[0]


class _Callbacks:
    """The states of a Trainer's callbacks as a Stateful, as in Lightning's own checkpoints."""

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._trainer, self._own = trainer, own

    def state_dict(self) -> dict[str, Any]:
        states = {
            callback.state_key: callback.state_dict()
            for callback in self._trainer.callbacks
            if callback is not self._own
        }
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for callback in self._trainer.callbacks:
            if callback.state_key in state:
                callback.load_state_dict(state[callback.state_key])


class _Progress:
    """The Trainer's counters as a Stateful, without the data loaders' own states."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        state = self._loop.state_dict()
        own = {k: v for k, v in state["state_dict"].items() if k != "combined_loader"}
        return {**state, "state_dict": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)
