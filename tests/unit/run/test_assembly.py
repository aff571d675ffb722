"""Release everything that was made before another rank failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from tests.unit.run.jobs import checkpointer, make_job
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.run import assembly
from torchrec_checknrun.save.background import Background


def test_a_background_that_another_rank_could_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Background] = []
    closed: list[Background] = []
    real = Ranks.on_all_ranks
    init, close = Background.__init__, Background.close

    def on_all_ranks(self: Ranks, act: Callable[[], Any]) -> list[Any]:
        before = len(made)
        found = real(self, act)
        if len(made) > before:
            raise MemoryError("of rank 1")
        return found

    def noted(self: Background, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def closing(self: Background) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Ranks, "on_all_ranks", on_all_ranks)
    monkeypatch.setattr(Background, "__init__", noted)
    monkeypatch.setattr(Background, "close", closing)
    with pytest.raises(MemoryError, match="of rank 1"):
        Checkpointer(str(tmp_path), model=nn.Linear(1, 1))
    assert len(made) == 1
    assert closed == made


@pytest.mark.usefixtures("one_rank")
def test_of_thousands_of_tables_without_room_the_first_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"table_{number:04d}" for number in range(3000)]
    monkeypatch.setattr(assembly, "too_large", lambda *_: names)
    with checkpointer(tmp_path, make_job(), quantization=Quantization(method="delta")):
        pass
    (said,) = (line for line in caplog.messages if "instead of 'delta'" in line)
    assert said.startswith("table_0000, table_0001, ")
    assert len(said) < 1000


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_some_ranks_waits_for_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse a model that is sharded over a sub process group at once: to wait for the other ranks
    would take half an hour.
    """
    job = make_job()
    dmp = next(m for m in job.model.modules() if isinstance(m, DistributedModelParallel))
    env = ShardingEnv(world_size=2, rank=0, pg=dist.group.WORLD)
    with monkeypatch.context() as patch:
        patch.setattr(dmp, "_env", env)
        patch.setattr(dist, "get_world_size", lambda group=None: 3)
        patch.setattr(assembly, "Ranks", None)  # a group of three would wait for two
        with pytest.raises(ValueError, match="over 2 of the job's 3 ranks,"):
            Checkpointer(tmp_path, model=nn.Sequential(job.model))
    Checkpointer(tmp_path, model=job.model).close()
