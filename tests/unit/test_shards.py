"""Write rows to their places in a shard, whatever the order."""

from __future__ import annotations

import pytest
import torch

from torchrec_checknrun.shards import put_rows


@pytest.mark.parametrize(
    "places",
    [[], [3], [0, 1, 2], [4, 5, 6, 7], [1, 3], [0, 2, 1, 3], [3, 2, 1], [7, 0]],
    ids=lambda places: "-".join(map(str, places)) or "none",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [None, 5])
def test_rows_come_to_their_places(places: list[int], dtype: torch.dtype, cols: int | None) -> None:
    shape = () if cols is None else (cols,)
    memory, rows = torch.rand(8, *shape).to(dtype), torch.rand(len(places), *shape)
    wanted = memory.clone()
    for place, row in zip(places, rows, strict=True):
        wanted[place] = row.to(dtype)
    put_rows(memory, torch.tensor(places, dtype=torch.int64), rows)
    assert torch.equal(memory, wanted)
