"""Rows that change without a backward pass: those of evicted ids, which another id gets.

TorchRec has the kernel reset them (managed collisions and pruning do), and initialises them again.
There is no hook for that, so that the kernel's own method is put behind one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

Listener = Callable[[int, torch.Tensor], None]
"""Called with a logical table's number and the local rows that are reset."""

_METHOD = "reset_embedding_weight_momentum"
_LISTENERS = "_checknrun_reset_listeners"


class ResetHook:
    """Tells a listener which rows of a table-batched embedding are reset, before they are."""

    def __init__(self, tbe: nn.Module, listener: Listener) -> None:
        self._tbe = tbe
        if hasattr(tbe, _METHOD):
            vars(tbe).setdefault(_LISTENERS, {})[id(self)] = listener
            # A method, not a closure: in a copy of the module it belongs to the copy.
            vars(tbe)[_METHOD] = MethodType(_tell_and_reset, tbe)

    def remove(self) -> None:
        """Takes the hook off; with the last one, the kernel is as it was."""
        listeners = vars(self._tbe).get(_LISTENERS, {})
        if listeners.pop(id(self), None) is not None and not listeners:
            del vars(self._tbe)[_LISTENERS], vars(self._tbe)[_METHOD]


def _tell_and_reset(
    self: Any,
    pruned_indices: torch.Tensor,
    pruned_indices_offsets: torch.Tensor,
    logical_table_ids: torch.Tensor,
    buffer_ids: torch.Tensor,
) -> None:
    offsets = pruned_indices_offsets.tolist()
    for table, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        rows = pruned_indices[offsets[buffer] : offsets[buffer + 1]]
        for listener in vars(self)[_LISTENERS].values():
            listener(table, rows)
    getattr(type(self), _METHOD)(
        self, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids
    )
