"""Tell why a kernel's update may change rows that were not looked up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

from torchrec_checknrun.model.kernels import _why_other_rows
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape

ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
IN_4_GIB = 1 << 24
"""Number of rows of 64 fp32 values, or 256 bytes."""


def shards(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[LocalShard]:
    return [
        LocalShard(
            table=f"t{number}",
            shape=TableShape(100, cols),
            rectangle=Rectangle(100 - rows, 100, 0, cols),
            weight=torch.empty(rows, cols, dtype=dtype, device="meta"),
            optimizer={},
        )
        for number, (rows, cols) in enumerate(shapes)
    ]


def why(
    *shapes: tuple[int, int],
    cpu: bool = True,
    features: Sequence[int] | None = None,
    pooling: PoolingMode = PoolingMode.SUM,
    optimizer: EmbOptimType = ROWWISE,
    counter: bool = False,
    dtype: torch.dtype = torch.float32,
) -> str:
    tbe = SimpleNamespace(
        use_cpu=cpu,
        optimizer=optimizer,
        feature_table_map=list(range(len(shapes)) if features is None else features),
        pooling_mode=pooling,
        _used_rowwise_adagrad_with_counter=counter,
    )
    return _why_other_rows(tbe, shards(*shapes, dtype=dtype))


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


@pytest.mark.parametrize("rows", [IN_4_GIB + 1, 3 * IN_4_GIB])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
def test_a_row_behind_4_gib(rows: int, pooling: PoolingMode) -> None:
    """Name the tables of which FBGEMM 1.8's row-wise Adagrad was seen to train other rows."""
    found = why((30, 20), (rows, 64), (IN_4_GIB, 64), pooling=pooling)
    assert "['t1']" in found
    assert "4 GiB" in found


@pytest.mark.parametrize(
    "kernel",
    [
        {"cpu": False},
        {"features": [0, 0]},
        {"pooling": PoolingMode.NONE},
        {"optimizer": EmbOptimType.EXACT_SGD},
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        {"counter": True},
        {"dtype": torch.float16},
    ],
)
def test_kernels_that_count_rows_behind_4_gib_right(kernel: dict[str, Any]) -> None:
    assert why((IN_4_GIB + 1, 64), **kernel) == ""


@pytest.mark.parametrize(("rows", "dim"), [(IN_4_GIB, 64), (10_737_419, 100)])
def test_the_last_row_that_begins_in_4_gib(rows: int, dim: int) -> None:
    assert why((rows, dim)) == ""
    assert why((rows + 1, dim)) != ""
