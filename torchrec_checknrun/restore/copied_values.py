"""Model tensors that a state dict has copies of: hooks clone them, cast them or gather them.

What is written into a copy never reaches the model, so such models are handed their restored state
dict by their own ``load_state_dict``, and asked afterwards whether that was taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.model.state_dict import StoredTables
from torchrec_checknrun.model.tracked import TrackedModel


def copied(
    model: nn.Module, content: object, tracked: TrackedModel
) -> dict[str, list[torch.Tensor]]:
    """Find the values of a model's state dict whose memory is that of no parameter, buffer or
    table.

    Returns:
        By name this rank's tensors of each, several of a sharded one; others than dicts have none.
    """
    if not isinstance(content, dict):
        return {}
    own = (*model.parameters(), *model.buffers())
    memory = {_address(local) for tensor in own for local in _locals(tensor)}
    stored = StoredTables(tracked.tables, (shard.local for shard in tracked.shards))
    found = {name: _locals(value) for name, value in content.items()}
    return {
        name: locals_
        for name, locals_ in found.items()
        if any(_address(local) not in memory and not stored.holds(local) for local in locals_)
    }


def load_copied(model: nn.Module, content: Any, tracked: TrackedModel) -> None:
    """Let a model load what was restored into copies; what was restored in place is loaded onto
    itself. On all ranks: it may be a collective.

    Args:
        content: the model's state dict, restored.

    Raises:
        IncompatibleCheckpoint: the model didn't take a value; names it.
    """
    copies = copied(model, content, tracked)
    wanted = {name: [local.clone() for local in locals_] for name, locals_ in copies.items()}
    model.load_state_dict(content, strict=False)
    now = model.state_dict()
    for name, expected in wanted.items():
        found = _locals(now.get(name))
        if len(found) != len(expected) or not all(map(_is_same, found, expected)):
            raise IncompatibleCheckpoint(
                f"the model's state_dict() has a copy of {name!r}, and its load_state_dict() does "
                "not take it back: let state_dict() return parameters and buffers themselves, or "
                "let load_state_dict() restore what it returns"
            )


def _locals(value: object) -> list[torch.Tensor]:
    """Return the memory that this rank has of a tensor."""
    if isinstance(value, ShardedTensor):
        return [local for shard in value.local_shards() for local in _locals(shard.tensor)]
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, LocalShardsWrapper):
        return [local for shard in value.local_shards() for local in _locals(shard)]
    if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        return []  # tensors that only wrap others have no memory, and are not saved
    has_memory = value.layout == torch.strided and not value.is_meta and value.numel() > 0
    return [value.detach()] if has_memory else []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two tensors have the same values; NaN is the same as NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    expected = expected.to(found.device)
    both_nan = (found != found) & (expected != expected)
    return bool(((found == expected) | both_nan).all())
