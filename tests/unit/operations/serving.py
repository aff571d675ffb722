"""Operate a root by serving from it, and by saves through ``dcp.save`` under a user's own names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.models import Model
from tests.distributed.states import State
from tests.unit.operations.lives import SPEC
from tests.unit.operations.world import World
from torchrec_checknrun import Follower
from torchrec_checknrun.dcp import SavePlanner, StorageWriter
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.tracking import track


def follow(world: World, choice: int) -> None:
    """Let a follower look at the root: it shows one checkpoint, the newest wherever it can."""
    if world.follower is None:
        world.follower = Follower(world.root, served(), copies=1 + choice % 2, memory_bytes=3000)
    before = world.follower.version
    try:
        version = world.follower.poll()
    except CheckNRunError:
        if not world.claims_hurt and world.facts.newest() is not None:
            raise
        return
    facts = world.facts
    wanted = facts.newest()
    if version is None:
        assert wanted is None
        return
    shows(world.follower, facts.known[version.checkpoint_id].state)
    if wanted is not None and not world.claims_hurt and before is not version:
        assert facts.known[wanted].place <= facts.known[version.checkpoint_id].place, wanted


def publish(world: World, choice: int) -> None:
    """Publish the newest chain elsewhere; a follower of that root shows the same."""
    facts, target = world.facts, world.folder / "published"
    wanted = facts.newest()
    if wanted is None or wanted != facts.newest(flipped=True) or world.claims_hurt:
        return
    keep = ("--keep", 1 + choice % 2) if choice % 3 else ()
    code, _, error = world.run("publish", world.root, target, *keep)
    assert code == 0, error
    follower = Follower(target, served(), memory_bytes=3000)
    assert follower.poll() is not None
    shows(follower, facts.known[wanted].state)
    assert world.run("verify", target)[0] == 0


def served() -> Model:
    """Make a model that serves what jobs train."""
    model = Model(SPEC)
    model.to_empty(device=torch.device("cpu"))
    return model.eval()


def shows(follower: Follower, wanted: State) -> None:
    """Compare what a follower serves with a checkpoint, bit for bit."""
    with follower.read() as (model, _):
        for name, value in model.state_dict().items():
            assert torch.equal(value, torch.from_numpy(wanted[f"model/{name}"])), name


def save_by_name(world: World, choice: int) -> None:
    """Save the run's state by ``dcp.save`` under a name of the user's, from a job of its own."""
    if world.claims_hurt or not world.root.exists():
        return
    if world.direct is None:
        world.seed += 1
        world.direct = world.processes.start(world.folder / "elsewhere", world.seed, False)
        world.direct.saver.close()
        world.tracked = track(world.direct.job.model, [world.direct.job.optimizer])
    job = world.direct.job
    job.train()
    name = f"mine-{len(world.log)}"
    state = {"model": job.model, "optimizer": job.optimizer, "job": job}
    planner = SavePlanner(world.tracked)
    with world.acting(world.direct):
        try:
            writer = StorageWriter(world.root / name)
            dcp.save(state, storage_writer=writer, planner=planner)
        except CheckpointException as error:
            pytest.fail(str(error))
    assert world.note(world.direct) == [name]
    world.hurt = world.life is not None
