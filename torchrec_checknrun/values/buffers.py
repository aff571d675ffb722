"""Save buffers that differ between ranks on purpose, such as BatchNorm's running statistics.

By default a restore gives all ranks the lowest rank's buffers. Buffers declared per rank are taken
out of the model's state and stored as a separate state of each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.values.dense import is_dense
from torchrec_checknrun.values.state import SHARDED

BUFFERS = "model.buffers"
"""Name of the state that holds each rank's own buffers."""

MergeBuffer = Callable[[list[torch.Tensor]], torch.Tensor]
"""Makes one buffer of all saved ranks' buffers, given in rank order."""
Patterns = str | Sequence[str] | Mapping[str, MergeBuffer | None]
"""Name patterns of per-rank buffers, see ``PerRankBuffers``."""


class PerRankBuffers:
    """The buffers of which each rank keeps its own.

    Args:
        patterns: ``fnmatch`` patterns over buffers' names in the model's state dict; in a mapping,
            each with a function that merges a buffer for another number of ranks, or None. The
            first matching pattern counts.
        names: names of the model's buffers.

    Attributes:
        patterns: the patterns as text.

    Raises:
        ValueError: a pattern matches no buffer, or a merge is no function.
    """

    def __init__(self, patterns: Patterns = (), names: frozenset[str] = frozenset()) -> None:
        if isinstance(patterns, str):
            patterns = (patterns,)
        if not isinstance(patterns, Mapping):
            patterns = dict.fromkeys(patterns)
        self.patterns = ", ".join(patterns) or "none"
        self._merges: dict[str, MergeBuffer | None] = {}
        for pattern, merge in patterns.items():
            if merge is not None and not callable(merge):
                raise ValueError(
                    f"per_rank_buffers: {pattern!r} has {merge!r}, expected a function of a list "
                    "of tensors (one for each saved rank) that returns one, or None"
                )
            matching = [name for name in sorted(names) if fnmatchcase(name, pattern)]
            if not matching:
                raise ValueError(
                    f"per_rank_buffers: {pattern!r} matches none of the model's buffers, which are "
                    f"{sorted(names)}: give a name of these, or a pattern such as '*.running_*'"
                )
            for name in matching:
                self._merges.setdefault(name, merge)

    @property
    def names(self) -> list[str]:
        """Return the buffers' names, sorted."""
        return sorted(self._merges)

    def __str__(self) -> str:
        return ", ".join(self.names) or "none"

    def without(self, names: Collection[str]) -> PerRankBuffers:
        """Return these buffers but for those of the names."""
        found = copy.copy(self)
        found._merges = {name: m for name, m in self._merges.items() if name not in names}
        return found

    def take(self, content: dict[str, Any]) -> dict[str, Any]:
        """Remove these buffers from a model's state dict and return them."""
        return {name: content.pop(name) for name in self._merges if name in content}

    def merge(self, saved: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Merge the saved buffers of all ranks into one rank's.

        Raises:
            IncompatibleCheckpoint: a merge function returned no tensor of the buffer's shape.
        """
        merged = {}
        for name, first in saved[0].items():
            merge = self._merges[name]
            assert merge is not None, "checked when the restore was planned"
            found = merge([of_rank[name] for of_rank in saved])
            if not isinstance(found, torch.Tensor) or found.shape != first.shape:
                shown = list(found.shape) if isinstance(found, torch.Tensor) else type(found)
                raise IncompatibleCheckpoint(
                    f"per_rank_buffers: the merge function of {name!r} returned {shown}, expected "
                    f"a tensor of shape {list(first.shape)}"
                )
            merged[name] = found.to(first.dtype)
        return merged

    def require_merges(self, names: Sequence[str], saved_ranks: int, ranks: int) -> None:
        """Refuse buffers that can't be merged for this number of ranks.

        Raises:
            IncompatibleCheckpoint: names the first such buffer.
        """
        for name in names:
            if self._merges.get(name) is None:
                raise IncompatibleCheckpoint(
                    f"the model's buffer {name!r} was saved per rank on {saved_ranks} ranks, and "
                    f"there are {ranks} now: give per_rank_buffers={{{name!r}: merge}}, where "
                    "merge makes one tensor of the list of all saved ones, or restore on "
                    f"{saved_ranks} ranks"
                )


def buffer_names(model: nn.Module, content: Mapping[str, Any]) -> frozenset[str]:
    """Find a model's buffers in its state dict by memory, since wrappers may rename them."""
    memory = {_place(buffer) for buffer in model.buffers() if _has_place(buffer)}
    if not memory:
        return frozenset()
    return frozenset(
        name
        for name, value in content.items()
        if isinstance(value, torch.Tensor) and _has_place(value) and _place(value) in memory
    )


def _has_place(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, SHARDED) and is_dense(tensor)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    # Empty tensors all have the same address.
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
