"""Tell of state that hooks of DistributedDataParallel keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.normalized import NormalizedJob
from tests.distributed.small_job import Workers
from tests.distributed.watch import warnings_said
from torchrec_checknrun import Checkpointer, PerRank


class Steps:
    """The part of the hook's state that changes: the steps until ranks train by themselves."""

    def __init__(self, hook: PostLocalSGDState) -> None:
        self.hook = hook

    def state_dict(self) -> dict[str, Any]:
        return {"iter": self.hook.iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hook.iter = state["iter"]


class HookedJob(NormalizedJob):
    def __init__(self, seed: int, stateful: bool = True) -> None:
        super().__init__(seed)
        self.optimizer.param_groups[0]["lr"] = 1e-3
        rank = dist.get_rank()
        alone = dist.new_group([rank], use_local_synchronization=True)
        self.state = PostLocalSGDState(None, alone, start_localSGD_iter=4)
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel) and stateful:
                module.register_comm_hook(self.state, post_localSGD_hook)
            elif isinstance(module, DistributedDataParallel):
                module.register_comm_hook(dist.group.WORLD, allreduce_hook)


def told_of(root: str) -> list[list[str]]:
    found = []
    for stateful, given in ((True, False), (True, True), (False, False)):
        job = HookedJob(0, stateful)
        state: dict[str, Any] = {"steps": PerRank(Steps(job.state))} if given else {}
        with warnings_said() as told:
            Checkpointer(root, model=job.model, state=state).close()
        found.append([text for text in told if "communication hook" in text])
    return found


def test_state_that_is_not_given_is_named(workers: Workers, tmp_path: Path) -> None:
    for stateful, given, stateless in workers(2).run(told_of, root=str(tmp_path / "root")):
        assert len(stateful) == 1
        assert "PostLocalSGDState" in stateful[0]
        assert given == stateless == []


def train(root: str, resume: bool) -> list[list[float]]:
    job = HookedJob(5 * resume)
    state: dict[str, Any] = {"steps": PerRank(Steps(job.state))}
    with job.checkpointer(root, state=state) as saver:
        if resume:
            saver.restore()
        for job.steps in range(saver.steps, 7):
            job.train()
            saver.step()
            if saver.steps == 3 and not resume:
                saver.save()
    return [
        parameter.detach().flatten().tolist()
        for name, parameter in job.model.named_parameters()
        if "bags" not in name
    ]


def test_given_state_comes_back(workers: Workers, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    zero, one = workers(2).run(train, root=root, resume=False)
    assert zero != one
    assert not torch.tensor(zero[0]).isnan().any()
    assert workers(2).run(train, root=root, resume=True) == [zero, one]
