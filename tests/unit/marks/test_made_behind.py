"""A kernel's compiled rows are made behind the cut, by whoever needs them, whatever happens."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from tests.unit.marks.row_copy_cases import overflow, tensors
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.row_copies import KernelCopies, RowCopies, ShardAtCut
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.skipif(
    not has_extension(), reason="the compiled extension was not built: there was no C++ compiler"
)
ROWS = 400


def kernel(copies: RowCopies, live: list[torch.Tensor]) -> KernelCopies:
    states = torch.zeros(ROWS, dtype=torch.uint8)
    return KernelCopies(copies, {0: ShardAtCut(None, live, states, 1)})


def memory(live: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return memory for all rows, and the places of their ids and of each tensor's."""
    offsets, end = [0], 8 * ROWS
    for tensor in live:
        offsets.append(end)
        end += tensor.nbytes
    return torch.zeros(end, dtype=torch.uint8), offsets


@pytest.mark.parametrize("seed", range(20))
def test_hook_and_background_need_them_at_once(seed: int) -> None:
    live = tensors(ROWS, seed)
    at_cut = [tensor.clone() for tensor in live]
    copies = RowCopies(overflow(40), 10.0)
    of_kernel = kernel(copies, live)
    meet, failed = threading.Barrier(2), []
    into, offsets = memory(live)

    def background() -> None:
        try:
            meet.wait()
            of_kernel.shards[0].stage(torch.arange(ROWS), 0, into, offsets)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    meet.wait()
    ids = torch.tensor(random.Random(seed).sample(range(ROWS), 150))
    of_kernel.before_update(ids, [0, len(ids)], [0])
    for tensor in live:
        tensor[ids] += 1
    thread.join()
    assert not failed
    for tensor, offset in zip(at_cut, offsets[1:], strict=True):
        staged = into[offset : offset + tensor.nbytes].numpy().tobytes()
        assert staged == tensor.numpy().tobytes()


def test_given_up_before_they_are_made() -> None:
    copies = RowCopies(overflow(40), 10.0)
    of_kernel = kernel(copies, tensors(ROWS))
    copies.fail(SaveFailed("says the test"))
    of_kernel.before_update(torch.arange(9), [0, 9], [0])
    assert of_kernel.native.protect_shard(0, torch.arange(9), 0) == 9
    assert copies.count().rows == 0


def test_given_up_by_a_signal_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = RowCopies(overflow(40), 10.0)
    of_kernel = kernel(copies, tensors(ROWS))
    made = of_kernel._made

    def interrupted() -> Any:
        copies.fail(SaveFailed("says a signal's handler"))  # in the same thread
        return made()

    monkeypatch.setattr(of_kernel, "_made", interrupted)
    of_kernel.before_update(torch.arange(9), [0, 9], [0])
    assert copies.count().rows == 0


def test_what_cannot_be_made_fails_the_save_and_no_hook() -> None:
    live = tensors(ROWS)
    copies = RowCopies(overflow(40), 10.0)
    wrong = ShardAtCut(None, live, torch.zeros(ROWS - 1, dtype=torch.uint8), 1)
    of_kernel = KernelCopies(copies, {0: wrong})
    of_kernel.before_update(torch.arange(9), [0, 9], [0])
    assert isinstance(copies.failure, SaveFailed)
    assert "could not be copied before their update" in str(copies.failure)
