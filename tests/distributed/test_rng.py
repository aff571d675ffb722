"""Continue the generators of each rank, on other numbers of ranks as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.small_job import Workers
from tests.unit.integrations.test_rng import drawn, saver


def on_ranks(root: str, save: bool) -> list[float]:
    torch.manual_seed(dist.get_rank())
    with saver(Path(root)) as checkpointer:
        if save:
            checkpointer.save()
        else:
            checkpointer.restore()
        return drawn()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_numbers_of_ranks(workers: Workers, tmp_path: Path, ranks: int) -> None:
    saved = workers(2).run(on_ranks, root=str(tmp_path), save=True)
    first, second = (workers(ranks).run(on_ranks, root=str(tmp_path), save=False) for _ in range(2))
    assert first == second
    assert len({tuple(numbers) for numbers in first}) == ranks
    assert (first == saved) == (ranks == 2)
