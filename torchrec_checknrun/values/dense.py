"""Tell dense tensors, whose values lie in memory one by one, from sparse and nested ones.

Only the former are stored. Of the others memory can't even be asked for: a program may have them
in places that no checkpoint holds.
"""

from __future__ import annotations

import torch

from torchrec_checknrun.errors import UnsupportedState


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in memory one by one: not of a sparse or nested one."""
    return tensor.layout is torch.strided and not tensor.is_nested


def require_dense(tensor: torch.Tensor, path: str) -> None:
    """Refuse a sparse or nested tensor.

    Raises:
        UnsupportedState: the tensor is one; names it.
    """
    if not is_dense(tensor):
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedState(
            f"{path} is a {kind} tensor: only dense tensors can be stored. Register a buffer that "
            "the program makes anew with persistent=False; else keep its indices and values, or "
            "its parts, as tensors of their own"
        )
