"""Mark the rows that kernels update which take ids of another type: they work on a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.unit.tracked_model import TALL, batch, make_model, modified, table
from torchrec_checknrun.model.kernels import find_kernels
from torchrec_checknrun.tracking import track

pytestmark = pytest.mark.usefixtures("group")

NARROW: dict[str, Any] = {
    "embedding_table_index_type": torch.int32,
    "embedding_table_offset_type": torch.int32,
}
"""TorchRec's parameters of a kernel, among those of the sharder."""


@pytest.mark.parametrize("fused", [None, NARROW], ids=["64 bits", "32 bits"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("wrong", [-5, 1000])
def test_an_id_out_of_range_marks_the_first_row(
    fused: dict[str, Any] | None, dtype: torch.dtype, wrong: int
) -> None:
    assert changed_and_marked(fused, [7, wrong], dtype) == ([0, 7], [0, 7])


def test_ids_beyond_32_bits_mark_the_row_that_is_left_of_them() -> None:
    assert changed_and_marked(NARROW, [7, (1 << 32) + 3], torch.int64) == ([3, 7], [3, 7])


@pytest.mark.parametrize("fused", [None, NARROW], ids=["64 bits", "32 bits"])
def test_ids_whose_memory_takes_the_next_batch_before_the_backward_pass(
    fused: dict[str, Any] | None,
) -> None:
    """Mark what the lookup has found: a kernel that takes ids of another type has a copy."""
    model = make_model(fused=fused)
    tracked = track(model)
    (kernel,) = (k.module for k in find_kernels(model)[0] if k.shards[0].table == TALL)
    ids = torch.tensor([7, 9], dtype=torch.int32 if fused is None else torch.int64)
    before = table(model, TALL)
    out = kernel(KeyedJaggedTensor(["shared", "b"], ids, lengths=torch.tensor([1, 1])))
    ids.fill_(2)
    out.square().sum().backward()
    assert (table(model, TALL) != before).any(1).nonzero().flatten().tolist() == [7, 9]
    assert modified(tracked) == {"tall": [7, 9]}
    tracked.close()


def changed_and_marked(
    fused: dict[str, Any] | None, ids: list[int], dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """Train once; return the rows that a table has got other values of, and the marked ones."""
    model = make_model(fused=fused)
    tracked = track(model)
    before = table(model, TALL)
    features = batch(b=[ids])
    features._values = features.values().to(dtype)
    model(features).square().sum().backward()
    found = (table(model, TALL) != before).any(1).nonzero().flatten().tolist()
    marked = modified(tracked).get("tall", [])
    tracked.close()
    return found, marked
