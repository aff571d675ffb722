"""Tell dense tensors, whose values lie in memory one by one, from others: sparse and nested ones,
and those of a class that keeps its values in tensors inside (torchao's optimizer states).

Only the former are stored. Of the others memory can't even be asked for: a program may have them
in places that no checkpoint holds.
"""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchrec_checknrun.errors import UnsupportedState


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in memory one by one."""
    return tensor.layout is torch.strided and not (_holds_others(tensor) or tensor.is_nested)


def _holds_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory of its own; a DTensor is taken by its local part."""
    if isinstance(tensor, ShardedTensor):  # may have several local parts
        return True
    others: bool = is_traceable_wrapper_subclass(tensor)
    return others and not isinstance(tensor, DTensor)


def require_dense(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor that is not dense.

    Raises:
        UnsupportedState: the tensor is one; names it.
    """
    if not is_dense(tensor):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        if _holds_others(tensor):
            kind = type(tensor).__name__
        raise UnsupportedState(
            f"{path} is a {kind} tensor: only dense tensors can be stored. Register a buffer that "
            "the program makes anew with persistent=False; else keep its indices and values, or "
            "its parts, as tensors of their own"
        )
