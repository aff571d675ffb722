"""Operate a root with the console tool, and by hand: prune, compact, move, copy, damage."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.unit.operations.running import restart, save
from tests.unit.operations.world import World
from torchrec_checknrun.format.names import MANIFEST_NAME


def prune(world: World, choice: int) -> None:
    """Prune: as announced, and once and for all."""
    keep = 1 + choice % 3
    hours = () if choice % 4 else ("--every-hours", 1)
    facts = world.facts
    told = world.run("prune", world.root, "--keep", keep, *hours, "--dry-run", "--json")
    before = sorted(path.name for path in world.root.iterdir()) if world.root.exists() else []
    with world.pruning(keep):
        code, out, error = world.run("prune", world.root, "--keep", keep, *hours, "--json")
    assert told[0] == code
    assert told[1].replace('run": true', 'run": false') == out
    if code:
        after = sorted(path.name for path in world.root.iterdir()) if before else []
        assert before == after
        hidden = facts.newest(flipped=True) is None
        assert world.claims_hurt or hidden or facts.cut & facts.pins, error
        return
    with world.pruning(keep):
        again = world.json("prune", world.root, "--keep", keep, *hours)
    assert [again["delete"], again["leftovers"]] == [{}, []]


def compact(world: World, choice: int) -> None:
    """Compact a chain that can be read, mostly the newest one."""
    facts = world.facts
    there = facts.in_order(facts.restorable() & facts.counting)
    if not there or world.claims_hurt:
        return
    id = there[choice % len(there)] if choice % 3 else None
    wanted = id or facts.newest()
    code, _, error = world.run("compact", world.root, *([] if id is None else [id]))
    new = world.note()
    assert code == 0 or (id is None and facts.newest() != facts.newest(flipped=True)), error
    if code == 0:
        assert wanted is not None
        assert len(new) == int(facts.known[wanted].parent is not None), (wanted, new)


def pin(world: World, choice: int) -> None:
    there = world.facts.in_order(world.facts.there)
    if there:
        id = there[choice % len(there)]
        code, _, error = world.run("pin", world.root, id)
        assert code == 0 or id in world.facts.cut, error
        world.facts.pins |= {id} if code == 0 else set()


def unpin(world: World, choice: int) -> None:
    if pins := sorted(world.facts.pins & world.facts.there):
        assert world.run("unpin", world.root, pins[choice % len(pins)])[0] == 0
        world.facts.pins.discard(pins[choice % len(pins)])


def look(world: World, choice: int) -> None:
    """Verify the root, and read it by each command that only reads."""
    facts = world.facts
    if not facts.there:
        return
    code, out, error = world.run("verify", world.root, "--json")
    assert code in (0, 1), error
    found = {one["id"]: one["problems"] for one in json.loads(out)["checkpoints"]}
    told = {id for id, problems in found.items() if problems and id in facts.there}
    assert told >= facts.problems(), facts.problems() - told
    assert told <= facts.may_be_told(), {id: found[id] for id in told - facts.may_be_told()}
    others = {id: problems for id, problems in found.items() if problems and id not in told}
    hidden = not facts.counting & facts.there
    assert not others or world.claims_hurt or hidden, others
    id = facts.in_order(facts.there)[choice % len(facts.there)]
    code, _, error = world.run("show", world.root, id, "--json")
    assert code == 0 or id in facts.cut, error
    whole = facts.in_order(facts.restorable())
    if len(whole) > 1:
        one, other = whole[choice % len(whole)], whole[0]
        world.json("diff", world.root, one, other)
        world.json("cat", world.root, one, "--table", "t0", "--rows", "1,5-7", "--optimizer")


def export(world: World, choice: int) -> None:
    """Export a checkpoint; compare tables with what a restore gives."""
    there = world.facts.in_order(world.facts.restorable())
    if not there:
        return
    id = there[choice % len(there)]
    target = world.folder / f"export-{len(world.log)}"
    code, _, error = world.run("export", world.root, target, id, "--format", "safetensors")
    assert code == 0, error
    for name, value in world.facts.known[id].state.items():
        if name.startswith("model/") and "embedding" in name:
            table = name.removeprefix("model/").removesuffix(".weight")
            found = load_file(target / f"{table}.safetensors")
            assert torch.equal(found["weight"], torch.from_numpy(value)), (id, table)
    shutil.rmtree(target)


def move(world: World, choice: int) -> None:
    """End the run, and rename the root or go on with a copy of it."""
    if not world.root.exists():
        return
    world.end()
    world.close_probe()
    target = world.folder / f"root-{len(world.log)}"
    (shutil.copytree if choice % 2 else Path.rename)(world.root, target)
    world.root = target


def back_up(world: World, choice: int) -> None:
    """Copy the root, to put parts of it back later."""
    target = world.folder / "backup"
    if world.root.exists() and not world.claims_hurt:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(world.root, target)
        bad = world.facts.cut | world.facts.flipped
        for id in bad & {path.name for path in target.iterdir()}:
            shutil.rmtree(target / id)


def put_back(world: World, choice: int) -> None:
    """Put a checkpoint back from the copy: one that is damaged, or gone.

    Where the root was claimed meanwhile, `adopt` makes it count: the claim lists what there was.
    """
    facts, backup = world.facts, world.folder / "backup"
    there = {path.parent.name for path in backup.glob(f"*/{MANIFEST_NAME}")}
    wanted = sorted(there & (facts.cut | facts.flipped | (facts.known.keys() - facts.there)))
    if not wanted or not world.root.exists():
        return
    id = wanted[choice % len(wanted)]
    shutil.rmtree(world.root / id, ignore_errors=True)
    shutil.copytree(backup / id, world.root / id)
    facts.there.add(id)
    facts.cut.discard(id)
    facts.flipped.discard(id)
    facts.pins.discard(id)
    if (world.root / id / "pinned").exists():
        facts.pins.add(id)
    world.hurt = True
    listed = world.json("ls", world.root)["checkpoints"]
    if [one["status"] for one in listed if one["id"] == id] == ["ignored"]:
        facts.counting.discard(id)


def delete(world: World, choice: int) -> None:
    """Delete a checkpoint's directory by hand."""
    there = world.facts.in_order(world.facts.there)
    if there:
        shutil.rmtree(world.root / there[choice % len(there)])
        world.gone()
        world.hurt = True


def damage(world: World, choice: int) -> None:
    """Cut a rank file, delete it, or change a byte of it."""
    there = world.facts.in_order(world.facts.there)
    if not there:
        return
    id = there[(choice // 3) % len(there)]
    file = world.root / id / "rank-00000.bin"
    if not file.exists():
        return
    data = file.read_bytes()
    world.hurt = True
    if choice % 3 == 0:
        file.unlink()
        world.facts.cut.add(id)
    elif choice % 3 == 1:
        file.write_bytes(data[: len(data) // 2])
        world.facts.cut.add(id)
    else:
        at = (choice * 131) % len(data)
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        world.facts.flipped.add(id)


def damage_manifest(world: World, choice: int) -> None:
    """Delete a manifest, or cut it."""
    there = world.facts.in_order(world.facts.there)
    if not there:
        return
    id = there[choice % len(there)]
    file = world.root / id / MANIFEST_NAME
    world.hurt = True
    if choice % 2:
        file.write_bytes(file.read_bytes()[:-20])
        world.facts.cut.add(id)
    else:
        file.unlink()
        world.gone()


def damage_pin(world: World, choice: int) -> None:
    """Cut a pin: it keeps its checkpoint nevertheless, and is told of until it is rewritten."""
    pins = sorted((world.facts.pins & world.facts.there) - world.facts.cut)
    if not pins:
        return
    id = pins[choice % len(pins)]
    file = world.root / id / "pinned"
    file.write_bytes(file.read_bytes()[: choice % 9])
    prune(world, choice)
    code, out, error = world.run("verify", world.root, "--json")
    assert code == 1, (out, error)
    assert id in out
    again = choice % 2 or world.claims_hurt
    code, _, error = world.run(
        *(("pin", world.root, id) if again else ("repair", world.root, "--yes"))
    )
    assert code == 0, error


def damage_claim(world: World, choice: int) -> None:
    """Cut the latest claim, or delete it, after the run has ended."""
    world.end()
    claims = sorted((world.root / "writers").glob("epoch-*.json"))
    if claims:
        world.claims_hurt = True
        if choice % 2:
            claims[-1].unlink()
        else:
            claims[-1].write_bytes(claims[-1].read_bytes()[:-9])
            os.utime(claims[-1], (1.0, 1.0))  # long ago: no live writer is about to rewrite it


def transplant(world: World, choice: int) -> None:
    """Copy a checkpoint of another run's root into this one, where its run has not written."""
    other = World(world.folder / f"other-{len(world.log)}", world.method, world.options)
    other.processes = world.processes
    other.seed = 1000 + len(world.log)
    restart(other, 0)
    for number in range(1 + choice % 2):
        save(other, number)
    other.end()
    other.close_probe()
    newest = other.facts.newest()
    assert newest is not None
    assert world.root.exists()
    chain = other.facts.chain(newest) or []
    for id in chain[-1:] if choice % 3 == 0 else chain:
        shutil.copytree(other.root / id, world.root / id)
        world.facts.known[id] = other.facts.known[id]
        world.facts.there.add(id)
    world.hurt = True
    world.ask_what_counts()
