"""Surround methods for several trackers: each learns which rows are reset, until removed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchrec_checknrun.model.hooks import reset_rows, surround

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


def listen(kernel: nn.Module) -> tuple[Callable[[], None], Told]:
    told: Told = []

    @contextmanager
    def around(*args: torch.Tensor, **kwargs: torch.Tensor) -> Iterator[None]:
        told.extend((table, rows.tolist()) for table, rows in reset_rows(*args, **kwargs))
        yield

    return surround(kernel, "reset_embedding_weight_momentum", around), told


def test_listeners_come_and_go() -> None:
    kernel = Kernel()
    plain = dict(vars(kernel))
    stop_first, told_first = listen(kernel)
    stop_second, told_second = listen(kernel)
    reset(kernel)
    assert told_first == told_second == [(2, [7, 3]), (0, [5])]
    stop_first()
    reset(kernel)
    assert (len(told_first), len(told_second)) == (2, 4)
    stop_second()
    stop_second()
    reset(kernel)
    assert (len(told_first), len(told_second), kernel.resets) == (2, 4, 6)
    assert vars(kernel).keys() == plain.keys()


def test_a_copy_resets_itself() -> None:
    kernel = Kernel()
    stop, _ = listen(kernel)
    other = copy.deepcopy(kernel)
    reset(other)
    assert (kernel.resets, other.resets) == (0, 2)
    stop()
    reset(other)
    assert (kernel.resets, other.resets) == (0, 4)


def test_a_kernel_that_resets_nothing() -> None:
    kernel = nn.Linear(1, 1)
    plain = dict(vars(kernel))
    stop, _ = listen(kernel)
    stop()
    assert vars(kernel).keys() == plain.keys()


def test_a_method_of_the_objects_own_stays() -> None:
    kernel, calls = Kernel(), []
    vars(kernel)["reset_embedding_weight_momentum"] = own = lambda **_: calls.append("own")
    stop, told = listen(kernel)
    reset(kernel)
    stop()
    reset(kernel)
    assert (calls, len(told), kernel.resets) == (["own"] * 2, 2, 0)
    assert vars(kernel)["reset_embedding_weight_momentum"] is own
