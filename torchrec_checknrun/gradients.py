"""Whether dense gradients wait for their optimizer: then a checkpoint would lose them.

Fused tables are updated within backward, dense parameters only when their optimizer steps. With
gradient accumulation, or a gradient scaler that skips a step, what has been accumulated so far is
in no checkpoint, though the samples behind it count as trained. So a checkpoint is put off until no
gradient waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchrec_checknrun.optimizers import torch_optimizers


class PendingGradients:
    """Watches the optimizers among state objects, by hooks on their parameters and steps.

    Args:
        states: state objects; those that are optimizers (torch's, or TorchRec's wrappers) count.
    """

    def __init__(self, states: Iterable[object]) -> None:
        self._waiting: set[Optimizer] = set()
        self._handles: list[RemovableHandle] = []
        for optimizer in torch_optimizers(states):
            self._watch(optimizer)

    @property
    def waiting(self) -> bool:
        """Whether an optimizer's parameters have got gradients since it last stepped, and have them
        yet: ``zero_grad`` drops those of a loss that was for other parameters, or not finite.
        """
        return any(
            has_gradient(parameter)
            for optimizer in self._waiting
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, optimizer: Optimizer) -> None:
        def accumulated(_parameter: torch.Tensor) -> None:
            self._waiting.add(optimizer)

        def stepped(*_: object) -> None:
            self._waiting.discard(optimizer)

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.is_leaf:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))
        self._handles.append(optimizer.register_step_post_hook(stepped))


def has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a step would apply a gradient to a parameter (this rank's part of it).

    Zeros are what ``zero_grad(set_to_none=False)`` leaves of a gradient: nothing is lost with them.
    """
    gradient = parameter.grad
    if gradient is None:
        return False
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient._values()
    return bool(gradient.any())
