"""X"""

from __future__ import annotations
from typing import Any
from collections.abc import Callable
from collections.abc import Mapping
from types import MethodType
from torchrec_checknrun.model.hand_written import announced
from torch import nn
import torch


Listener = Callable[[int, torch.Tensor], None]
"""Called with a logical table's number and the local rows that are reset."""


_METHOD = "reset_embedding_weight_momentum"


_LISTENERS = "_checknrun_reset_listeners"


_HOOKS = "_checknrun_eviction_hooks"


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
    with announced([self]):
        getattr(type(self), _METHOD)(
            self, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids
        )


class EvictionHook:
    """Announces what a sharded managed-collision collection writes to the rows of evicted ids."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        attributes = vars(collection)
        attributes[_HOOKS] = attributes.get(_HOOKS, 0) + 1
        attributes["_evict"] = MethodType(_announce_and_evict, collection)

    def remove(self) -> None:
        """Take the hook off; with the last one, the collection is as it was."""
        attributes = vars(self._collection)
        attributes[_HOOKS] -= 1
        if not attributes[_HOOKS]:
            del attributes[_HOOKS], attributes["_evict"]


def _announce_and_evict(self: Any, evictions_per_table: Mapping[str, torch.Tensor | None]) -> None:
    evict = type(self)._evict
    if all(rows is None for rows in evictions_per_table.values()):
        evict(self, evictions_per_table)
        return
    lookups = self._embedding_module._lookups
    with announced(kernel._emb_module for lookup in lookups for kernel in lookup._emb_modules):
        evict(self, evictions_per_table)
