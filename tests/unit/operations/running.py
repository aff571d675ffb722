"""Operate a root by training: runs that save, end, are killed, go on, fall back, or begin anew."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.distributed.states import gather, scramble
from tests.unit.operations.lives import Life
from tests.unit.operations.world import World, compare
from torchrec_checknrun.errors import (
    CheckNRunError,
    ClaimDamaged,
    RootInUse,
    SaveFailed,
)
from torchrec_checknrun.writers.lease import Lease


def save(world: World, choice: int) -> None:
    """Train, and save; a run that was hurt may fail once, or be told that it lost the root."""
    if world.life is None:
        restart(world, choice)
    life = world.life
    assert life is not None
    for attempt in range(3):
        try:
            _save(world, life, 1 + choice % 3)
            return
        except (RootInUse, ClaimDamaged) as error:
            if not (world.hurt or world.claims_hurt):
                raise
            world.log.append(f"  {error}")
            _drop(world)
            return
        except SaveFailed as error:
            if attempt == 2 or not world.hurt:
                raise
            world.log.append(f"  {error}")


def _save(world: World, life: Life, steps: int) -> None:
    with world.pruning(world.keep, by_run=True):
        world.train(life, steps)
        with world.acting(life):
            report = life.saver.save()
            life.writer.wait_for_pruning()
        assert report.id in world.note(life)
    world.hurt = False


def _drop(world: World) -> None:
    """End a run that has lost its root."""
    life, world.life = world.life, None
    if life is not None:
        with suppress(CheckNRunError):
            world.processes.end(life)
        world.processes.dead.add(life.name)


def restart(world: World, choice: int) -> None:
    """End the run, if one lives, and start one that goes on from the newest checkpoint."""
    world.end()
    newest, perhaps = world.facts.newest(), world.facts.newest(flipped=True)
    life = world.start(choice)
    scramble(life.job)
    try:
        with world.acting(life):
            report = life.saver.restore()
    except CheckNRunError as error:
        if not (world.claims_hurt or (newest is None and world.facts.there)):
            raise
        world.log.append(f"  {error}")
        world.end()
        _settle(world)
        return
    if report is None:
        assert newest is None
        assert perhaps is None
        life.job.steps = 0
        return
    if newest is not None:
        assert world.facts.known[newest].place <= world.facts.known[report.id].place
    wanted = world.facts.known[report.id]
    compare(report.id, gather(life.job), wanted.state, lossy=False)
    assert life.job.steps == wanted.steps


def _settle(world: World) -> None:
    """Do what the error has said: repair, or begin anew where nothing can be restored."""
    if world.claims_hurt:
        repair(world, 0)
        restart(world, 0)
    else:
        fresh(world, 0)


def fresh(world: World, choice: int) -> None:
    """Start a run that restores nothing."""
    world.end()
    life = world.start(choice, resume="never")
    with world.acting(life), suppress(ClaimDamaged):
        assert life.saver.restore() is None


def kill(world: World, choice: int) -> None:
    """Kill the run; perhaps in the midst of a save, which leaves files."""
    life, world.life = world.life, None
    if life is not None:
        if choice % 2:
            world.train(life, 1)
        world.processes.kill(life)
    if choice % 3 == 0:
        leftover(world, choice)


def leftover(world: World, choice: int) -> None:
    """Leave what a killed save leaves: files without a manifest."""
    number = 1 + max((k.sequence for k in world.facts.known.values()), default=0)
    name = f"seq-{number - choice % 4:06}_step-{choice:08}_{choice:08x}"
    (world.root / name).mkdir(parents=True, exist_ok=True)
    (world.root / name / "rank-00000.bin").write_bytes(b"half of it")


def fall_back(world: World, choice: int) -> None:
    """Let the run go back to an older checkpoint, or to any that can be restored: a fork."""
    there = world.facts.in_order(world.facts.restorable() & world.facts.counting)
    if not there or world.claims_hurt:
        return
    if world.life is None:
        world.start(choice)
    life, id = world.life, there[choice % len(there)]
    assert life is not None
    scramble(life.job)
    try:
        with world.acting(life):
            report = life.saver.restore(id)
    except (RootInUse, ClaimDamaged) as error:
        if not world.hurt:
            raise
        world.log.append(f"  {error}")
        _drop(world)
        return
    assert report is not None
    assert report.id == id
    compare(id, gather(life.job), world.facts.known[id].state, lossy=False)
    life.job.data_seed += 1000  # what follows differs from what it did before


def unlock(world: World, choice: int) -> None:
    """Take the right to commit from whoever has it."""
    code, _, error = world.run("unlock", world.root, "--yes")
    assert code == 0 or world.claims_hurt or not world.facts.there, error
    world.hurt = True


def take_over(world: World, choice: int) -> None:
    """Let a run commit after another one has taken the root over: that does not count."""
    if world.life is None or world.claims_hurt:
        return
    old = world.life
    if old.writer._lease is None or world.hurt or world.run("unlock", world.root, "--yes")[0]:
        return
    world.life = None
    if choice % 3:
        _commit_late(world, old, 1 + choice % 2)
    restart(world, choice)
    save(world, choice)
    if not choice % 3:  # with the number of what the new one has saved, whose next save says so
        _commit_late(world, old, 1 + choice % 2)
        world.hurt = True
    with suppress(CheckNRunError):
        world.processes.end(old)
    world.processes.dead.add(old.name)


def _commit_late(world: World, old: Life, count: int) -> None:
    """Let a run commit that looked at its claim right before it was taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "check", lambda self: None)
        patch.setattr(type(old.writer), "before_commit", lambda *_, **__: None)
        patch.setattr(type(old.writer), "prune", lambda *_: None)
        for _ in range(count):
            world.train(old, 1)
            with world.acting(old):
                old.saver.save()
            assert len(world.note(old, counts=False)) == 1


def adopt(world: World, choice: int) -> None:
    """Make one of the ignored checkpoints count, or several."""
    facts = world.facts
    others = facts.in_order(facts.there - facts.counting)
    ids = others[choice % 3 : choice % 3 + 1 + choice % 2] or others[:1]
    if not ids:
        return
    code, _, error = world.run("adopt", world.root, *ids, "--yes")
    if code == 0:
        world.hurt = True
        facts.counting |= set(ids)
        return
    whole = all(facts.chain(id) is not None for id in ids)
    assert not whole or world.claims_hurt or world.life is not None, error


def repair(world: World, choice: int) -> None:
    """Let the root be repaired; no checkpoint that has counted may be lost by that."""
    if world.claims_hurt:
        world.end()  # a live run rewrites its claim by itself
    code, _, error = world.run("repair", world.root, "--yes")
    if code:
        assert world.life is not None or not world.facts.there, error
        return
    if world.claims_hurt:
        world.claims_hurt = False
        if not world.facts.there:
            return
        listed = {o["id"]: o["status"] for o in world.json("ls", world.root)["checkpoints"]}
        facts = world.facts
        counting = {id for id in facts.there if listed[id] != "ignored"}
        hidden = {id for id in facts.counting & facts.there - counting if facts.chain(id)}
        assert not hidden, hidden
        facts.counting |= counting
    world.hurt = True
