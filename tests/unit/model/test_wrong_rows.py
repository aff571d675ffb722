"""Tell why a kernel's update may change rows that were not looked up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torchrec_checknrun.model.kernels import _why_other_rows
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape


def shards(*shapes: tuple[int, int]) -> list[LocalShard]:
    return [
        LocalShard(
            table=f"t{number}",
            shape=TableShape(100, cols),
            rectangle=Rectangle(100 - rows, 100, 0, cols),
            weight=torch.zeros(rows, cols),
            optimizer={},
        )
        for number, (rows, cols) in enumerate(shapes)
    ]


def why(*shapes: tuple[int, int], cpu: bool = True) -> str:
    tbe = SimpleNamespace(use_cpu=cpu, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    return _why_other_rows(tbe, shards(*shapes))


@pytest.mark.parametrize(
    ("shapes", "empty", "wrong"),
    [
        ([(0, 8), (30, 20)], ["t0"], "t1"),
        ([(0, 20), (30, 8)], ["t0"], "t1"),
        ([(30, 20), (0, 8), (30, 20)], ["t1"], "t2"),
        ([(0, 8), (0, 20), (30, 20)], ["t0"], "t2"),
        ([(0, 20), (0, 8), (30, 8), (30, 8)], ["t0"], "t2"),
    ],
)
def test_a_table_behind_one_without_rows(
    shapes: list[tuple[int, int]], empty: list[str], wrong: str
) -> None:
    """Name both, as FBGEMM 1.8's own CPU kernel was seen to train them."""
    found = why(*shapes)
    assert f"where {empty}, without a row" in found
    assert f"before {wrong}, which" in found
    assert "table_wise" in found
    assert why(*shapes, cpu=False) == ""


@pytest.mark.parametrize(
    "shapes",
    [[], [(30, 8)], [(0, 8)], [(30, 8), (20, 20)], [(0, 8), (30, 8), (30, 20)], [(30, 20), (0, 8)]],
)
def test_other_kernels_train_what_was_looked_up(shapes: list[tuple[int, int]]) -> None:
    assert why(*shapes) == ""
