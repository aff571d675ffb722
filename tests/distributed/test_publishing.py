"""Ranks publish together: at one step, by rank 0's clock, and only all or none of their rows."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import references
from tests.distributed.models import Job, Model, Plan
from tests.distributed.resharding import TABLES, gloo_can_reshard, reshard
from tests.distributed.small_job import SPEC, build, checkpointer, keep, where
from tests.distributed.states import State, gather
from tests.distributed.worker_pool import CaseFailed, WorkerPool
from tests.distributed.zoo import build_zoo
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Follower, Publish
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.run.publisher import Publisher
from torchrec_checknrun.save import background

Workers = Callable[[int], WorkerPool]
MIXED: Plan = {"a.t0": "row_wise", "a.t1": "table_wise:1", "b.t0": "data_parallel"}


def serve(root: str) -> str:
    return f"{root}-serve"


def publisher(saver: Checkpointer) -> Publisher:
    found = saver._publisher
    assert found is not None
    return found


def publish(saver: Checkpointer) -> CheckpointReport:
    report = saver.publish()
    assert report is not None
    return report


def follow(root: str) -> Follower:
    """Follow by an unsharded model of other weights."""
    torch.manual_seed(9)
    model = Model(SPEC).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return Follower(serve(root), model)


def wrong(follower: Follower, wanted: State) -> list[str]:
    """Name the values of the served model that differ."""
    with follower.read() as (model, _):
        own = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    assert len(own) == 7
    return [name for name, v in own.items() if not np.array_equal(v, wanted[f"model/{name}"])]


def by_the_clock(root: str, spec: dict[str, Any], plan: Plan) -> list[int]:
    """Train and save; return the steps at which this rank has published."""
    job = build(spec, plan)
    # Of other ranks the clock doesn't count: rank 1's would never be due.
    rule = Publish(serve(root), every_seconds=1e-6, bits=32)
    begun = []
    follower = follow(root)
    with checkpointer(root, job, policy=Consecutive(), publish=rule, every_steps=5) as saver:
        if dist.get_rank():
            saver._publisher._schedule._clock = lambda: 0.0  # type: ignore[union-attr]  # made above
        states = {}
        for _ in range(20):
            job.train(1)
            states[job.steps] = gather(job)
            before = publisher(saver)._running
            saver.step()
            running = publisher(saver)._running
            if running is not None and running is not before:
                begun.append(job.steps)
            saver.wait()
            dist.barrier()
            if (version := follower.poll()) is not None:
                assert wrong(follower, states[version.step]) == []
    return begun


def one_rank_fails(root: str, spec: dict[str, Any], plan: Plan) -> list[str]:
    job = build(spec, plan)
    rule = Publish(serve(root), every_seconds=1e6, bits=32)
    kinds = []
    follower = follow(root)
    with checkpointer(root, job, policy=Consecutive(), publish=rule) as saver:
        job.train(1)
        kinds.append(publish(saver).kind)
        job.train(1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                full = OSError(errno.ENOSPC, "No space left on device")
                patch.setattr(background, "write_rank_file", _raising(full))
            assert saver.publish() is None
            assert publisher(saver).failures == 1
        saver.save()
        job.train(1)
        kinds.append(publish(saver).kind)
        version = follower.poll()
        assert version is not None
        assert wrong(follower, gather(job)) == []
        job.train(1)
        saver.restore()
        kinds.append(publish(saver).kind)
        version = follower.poll()
        assert version is not None
        assert wrong(follower, gather(job)) == []
    return kinds


def _raising(error: Exception) -> Callable[..., Any]:
    def act(*args: Any, **more: Any) -> Any:
        raise error

    return act


def dies(root: str, spec: dict[str, Any], plan: Plan, lives: int) -> None:
    """Publish twice, keep the state, and in the first of the lives die in the third publication,
    when all rank files are there and the manifest is not.
    """
    job = build(spec, plan, seed=lives)
    rule = Publish(serve(root), every_seconds=1e6, bits=32)
    with checkpointer(root, job, policy=Consecutive(), publish=rule) as saver:
        for _ in range(2):
            job.train(1)
            saver.step()
            publish(saver)
        keep(job, root, "published")
        if lives == 0:
            job.train(1)
            saver.step()
            publisher(saver)._writer.before_commit = _die  # type: ignore[method-assign]  # a bomb
            saver.publish()


def _die(proposal: object, hidden: bool = False) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shards_move(root: str) -> list[str]:
    """Publish, reshard, publish: a base, though marks move with their rows."""
    zoo = build_zoo("bags", TABLES, "rowwise_adagrad")
    rule = Publish(serve(root), every_seconds=1e6)
    kinds = []
    with (
        Checkpointer(
            root, model=zoo.model, state={"optimizer": zoo.optimizer}, publish=rule
        ) as saver,
        gloo_can_reshard(),
    ):
        for change in (None, None, {"t0": [1]}, None):
            if change is not None:
                reshard(zoo, change, by="model")
            zoo.train(1)
            kinds.append(publish(saver).kind)
    return kinds


def refusals(root: str) -> None:
    rule = Publish(serve(root))
    job = Job.build(SPEC, MIXED)
    job.model.module.register_buffer("seen", torch.zeros(2))
    with pytest.raises(UnsupportedState, match="each rank has its own seen"):
        Checkpointer(root, model=job.model, per_rank_buffers="seen", publish=rule)
    other = Publish(f"{serve(root)}-{dist.get_rank()}")
    with pytest.raises(ValueError, match="publish differs between the ranks"):
        Checkpointer(root, model=job.model, publish=other)


def test_all_ranks_at_one_step_by_rank_0s_clock(workers: Workers, tmp_path: Path) -> None:
    given = {**where(tmp_path), "plan": MIXED}
    one, other = workers(2).run(by_the_clock, **given)
    assert one == other
    assert len(one) > 2


def test_a_failure_of_one_rank_is_one_of_all(workers: Workers, tmp_path: Path) -> None:
    given = {**where(tmp_path), "plan": MIXED}
    assert workers(2).run(one_rank_fails, **given) == [["full", "differential", "full"]] * 2


def test_a_base_after_shards_have_moved(workers: Workers, tmp_path: Path) -> None:
    kinds = workers(2).run(shards_move, root=str(tmp_path / "root"))
    assert kinds == [["full", "differential", "full", "differential"]] * 2


def test_what_no_follower_could_serve_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(refusals, root=str(tmp_path / "root"))


def test_killed_between_rank_files_and_manifest(workers: Workers, tmp_path: Path) -> None:
    given = {**where(tmp_path), "plan": MIXED}
    with pytest.raises(CaseFailed, match="rank 0: the worker died"):
        workers(2).run(dies, **given, lives=0)
    left = sorted(Path(serve(given["root"])).glob("seq-*"))
    assert [sorted(path.name for path in folder.iterdir()) for folder in left] == [
        ["manifest.json", "rank-00000.bin", "rank-00001.bin"],
        ["manifest.json", "rank-00000.bin", "rank-00001.bin"],
        ["rank-00000.bin", "rank-00001.bin"],
    ]
    follower = follow(given["root"])
    for life, step in ((0, 2), (1, 2)):
        if life:
            workers(2).run(dies, **given, lives=life)
        version = follower.poll()
        assert version is not None
        assert (version.step, version.error, version.whole) == (step, None, True)
        wanted = references.load(tmp_path / "published.npz")
        assert wrong(follower, wanted) == []
    assert not left[2].exists()  # the next run has cleared it away
