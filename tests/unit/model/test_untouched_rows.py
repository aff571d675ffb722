"""Notice writes that PyTorch does not count, by rows that changed without a mark."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.unit.tracked_model import ROWS, TALL, WIDE, make_model, only, train
from torchrec_checknrun.model.hand_written import announced
from torchrec_checknrun.tracking import Consumer, TrackedModel, track

pytestmark = pytest.mark.usefixtures("group")
EVERYTHING = {name: [*range(ROWS)] for name in ("wide", "tall", "split")}
TOLD = "changed that no lookup touched"


def weight(tracked: TrackedModel, name: str) -> torch.Tensor:
    return only(tracked, name).local.weight


def scale(tensor: torch.Tensor) -> None:
    tensor.data.mul_(1.5)


def clamp(tensor: torch.Tensor) -> None:
    tensor.data.clamp_(-0.01, 0.01)


def numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] += 1


def nan(tensor: torch.Tensor) -> None:
    tensor.data.fill_(torch.nan)


def cut_rows(tracked: TrackedModel) -> dict[str, list[int]]:
    """Cut the marks, and return the cut's rows."""
    cut = tracked.cut(Consumer.LAST)
    found = {}
    for shard in tracked.shards:
        rows = cut.bytes(shard.marks).nonzero()[:, 0].tolist()
        if rows:
            found[shard.table.rpartition(".")[2]] = rows
    return found


@pytest.mark.parametrize("write", [scale, clamp, numpy, nan])
@pytest.mark.parametrize("name", [WIDE, TALL])
def test_a_write_that_nothing_counts(
    tracked: TrackedModel,
    model: nn.Module,
    write: Callable[[torch.Tensor], None],
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Mark all rows of all tables, once for each write; warn once."""
    train(model, a=[[1, 2]], shared=[[3]])
    assert cut_rows(tracked) == {"wide": [1, 2], "tall": [3], "split": [3]}
    train(model, a=[[2]])
    assert cut_rows(tracked) == {"wide": [2]}
    assert TOLD not in caplog.text
    with caplog.at_level(logging.WARNING, "torchrec_checknrun"):
        write(weight(tracked, name))
        train(model, a=[[4]])
        assert cut_rows(tracked) == EVERYTHING
        train(model, a=[[4]])
        assert cut_rows(tracked) == {"wide": [4]}
        scale(weight(tracked, name)[:ROWS])
        found = cut_rows(tracked)
    assert found == (EVERYTHING if write is not nan else {})
    assert caplog.text.count(f"rows of {name} {TOLD}") == 1
    assert caplog.text.count(TOLD) == 1


def test_what_training_and_told_writes_change_is_no_such_write(
    tracked: TrackedModel, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    random = torch.Generator().manual_seed(0)
    tracked.cut(Consumer.LAST)
    with caplog.at_level(logging.WARNING, "torchrec_checknrun"):
        for turn in range(60):
            ids = torch.randint(ROWS, (3,), generator=random).tolist()
            train(model, a=[ids[:2]], shared=[ids[2:]])
            if turn % 3 == 0:
                with tracked.writing(TALL, [ids[0]]):
                    weight(tracked, TALL).data[ids[0]] = turn
            if turn % 5 == 0:
                only(tracked, WIDE).write_rows([ids[1]], torch.full((1, 8), float(turn)))
            if turn % 7 == 0:
                kept = tracked.cut(Consumer.LAST)
                tracked.merge(kept)
            if turn % 2 == 0:
                tracked.cut(Consumer.LAST | Consumer.BASELINE)
    assert TOLD not in caplog.text


def test_marks_that_are_cleared_end_the_comparison(
    tracked: TrackedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Compare nothing with what rows were before a restore, and all with what they are after."""
    tracked.cut(Consumer.LAST)
    tracked.begin_restore({WIDE, TALL})
    with announced([shard.kernel_module for shard in tracked.shards]):
        scale(weight(tracked, WIDE))
    tracked.acknowledge_writes()
    assert cut_rows(tracked) == {}
    tracked.begin_restore({WIDE, TALL})
    tracked.acknowledge_writes()
    scale(weight(tracked, WIDE))
    assert cut_rows(tracked) == EVERYTHING
    assert TOLD in caplog.text


def test_a_sample_moves_to_rows_that_training_leaves_alone() -> None:
    """Drop a table of which training changes all rows, and look at it no more."""
    model = make_model()
    tracked = track(model)
    (marks,) = (shard.marks for shard in tracked.shards if shard.table == WIDE)
    for _ in range(20):
        train(model, a=[[row] for row in range(ROWS)])
        cut_rows(tracked)
    assert marks.untouched is not None
    assert len(marks.untouched._rows) == 0
    scale(weight(tracked, WIDE))
    assert cut_rows(tracked) == {}
    tracked.close()


def test_global_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    model = make_model()
    torch.manual_seed(3)
    tracked = track(model)
    train(model, a=[[1]])
    cut_rows(tracked)
    cut_rows(tracked)
    assert torch.equal(torch.rand(2), wanted)
    tracked.close()
