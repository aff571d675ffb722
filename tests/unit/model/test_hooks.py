"""Tell all listeners of the rows that a kernel resets, until a listener is removed."""

from __future__ import annotations

import copy

import torch
from torch import nn

from torchrec_checknrun.model.hooks import ResetHook

Told = list[tuple[int, list[int]]]


class Kernel(nn.Module):
    """A stand-in with the method of a table-batched embedding that TorchRec calls."""

    def __init__(self) -> None:
        super().__init__()
        self.resets = 0

    def reset_embedding_weight_momentum(
        self,
        pruned_indices: torch.Tensor,
        pruned_indices_offsets: torch.Tensor,
        logical_table_ids: torch.Tensor,
        buffer_ids: torch.Tensor,
    ) -> None:
        self.resets += len(logical_table_ids)


def reset(kernel: Kernel) -> None:
    """Reset rows 7 and 3 of table 2, and row 5 of table 0."""
    kernel.reset_embedding_weight_momentum(
        pruned_indices=torch.tensor([5, 9, 7, 3]),
        pruned_indices_offsets=torch.tensor([0, 1, 2, 4]),
        logical_table_ids=torch.tensor([2, 0], dtype=torch.int32),
        buffer_ids=torch.tensor([2, 0], dtype=torch.int32),
    )


def listen(kernel: nn.Module) -> tuple[ResetHook, Told]:
    told: Told = []
    return ResetHook(kernel, lambda table, rows: told.append((table, rows.tolist()))), told


def test_listeners_come_and_go() -> None:
    kernel = Kernel()
    plain = dict(vars(kernel))
    first, told_first = listen(kernel)
    second, told_second = listen(kernel)
    reset(kernel)
    assert told_first == told_second == [(2, [7, 3]), (0, [5])]
    first.remove()
    reset(kernel)
    assert (len(told_first), len(told_second)) == (2, 4)
    second.remove()
    second.remove()
    reset(kernel)
    assert (len(told_first), len(told_second), kernel.resets) == (2, 4, 6)
    assert vars(kernel).keys() == plain.keys()


def test_a_copy_resets_itself() -> None:
    kernel = Kernel()
    hook, _ = listen(kernel)
    other = copy.deepcopy(kernel)
    reset(other)
    assert (kernel.resets, other.resets) == (0, 2)
    hook.remove()
    reset(other)
    assert (kernel.resets, other.resets) == (0, 4)


def test_a_kernel_that_resets_nothing() -> None:
    kernel = nn.Linear(1, 1)
    plain = dict(vars(kernel))
    hook, _ = listen(kernel)
    hook.remove()
    assert vars(kernel).keys() == plain.keys()
