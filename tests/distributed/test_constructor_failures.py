"""All ranks hear of a Checkpointer that one rank can't make; another one can be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import optimizer

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, where
from torchrec_checknrun.run import assembly as module


def fail_on_one_rank(root: str, spec: dict[str, Any], plan: Plan, part: str) -> int:
    job = build(spec, plan)
    hooks = len(optimizer._global_optimizer_post_hooks)
    made = getattr(module, part)

    def fail(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no more threads")
        return made(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        fail.close = made.close  # type: ignore[attr-defined]  # a stub
        patch.setattr(module, part, fail)
        with pytest.raises(OSError, match="no more threads"):
            checkpointer(root, job)
    assert len(optimizer._global_optimizer_post_hooks) == hooks
    with checkpointer(root, job) as saver:
        saver.save()
    return 1


@pytest.mark.parametrize("part", ["Saver", "Schedule"])
def test_one_rank_fails(workers: Workers, tmp_path: Path, part: str) -> None:
    assert workers(2).run(fail_on_one_rank, part=part, **where(tmp_path)) == [1, 1]
