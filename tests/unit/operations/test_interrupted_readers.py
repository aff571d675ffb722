"""Interrupt a restore, and a follower's look, at any call of the storage: each gives one checkpoint
exactly, the newest of then or a newer one, and the next one gives the newest.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.states import gather, scramble
from tests.examples import ALL, some_of
from tests.unit.interruption import interrupted
from tests.unit.operations import keeping, running
from tests.unit.operations.serving import served, shows
from tests.unit.operations.world import World, compare, world
from torchrec_checknrun import Consecutive, Follower, Retention
from torchrec_checknrun.format import reader as chunks
from torchrec_checknrun.store.folder import Folder

EVERY = 1 if ALL else 13
"""Calls from one interruption to the next."""


def compact_and_prune(of: World) -> None:
    keeping.compact(of, 0)
    of.run("prune", of.root, "--keep", 1)
    of.gone()


def go_on(of: World) -> None:
    """Let another run take the root, save, and delete what it doesn't need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(of.options, "retention", Retention(1))
        running.restart(of, 1)
    running.save(of, 1)
    of.end()
    of.gone()


ACTS: dict[str, Callable[[World], object]] = {
    "compact and prune": compact_and_prune,
    "go on": go_on,
    "prune": lambda w: w.run("prune", w.root, "--keep", 1),
    "repair": lambda w: w.run("repair", w.root, "--yes"),
    "unlock": lambda w: w.run("unlock", w.root, "--yes"),
    "pin": lambda w: w.run("pin", w.root, w.facts.in_order(w.facts.there)[-1]),
    "publish": lambda w: w.run("publish", w.root, w.folder / "published", "--keep", 1),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return a root with one chain, whose run has ended; its missing files are not waited for."""
    real = chunks._fill

    def fill(folder: Folder, memory: memoryview, name: str, offset: int, _: float) -> int:
        return real(folder, memory, name, offset, 0.0)

    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch, world(folder, None, policy=Consecutive()) as made:
        patch.setattr(chunks, "_fill", fill)
        for choice in (1, 2, 0):
            running.save(made, choice)
        made.end()
        made.check()
        made.close_probe()
        yield made


def restoring(of: World) -> Callable[[], str]:
    """Return what restores the newest checkpoint into a run's model, checks it and names it."""
    life = of.processes.start(of.root, 1, lossy=False)

    def look() -> str:
        scramble(life.job)
        with of.processes.acting(life.name):
            report = life.saver.restore()
        assert report is not None
        assert report.passed_over == ()
        wanted = of.facts.known[report.id]
        compare(report.id, gather(life.job), wanted.state, lossy=False)
        assert life.job.steps == wanted.steps
        return report.id

    return look


def following(of: World, copies: int) -> Callable[[], str]:
    """Return what lets a follower look, checks what it shows and names that."""
    follower = Follower(of.root, served(), copies=copies, memory_bytes=3000)

    def look() -> str:
        version = follower.poll()
        assert version is not None
        assert version.error is None
        shows(follower, of.facts.known[version.checkpoint_id].state)
        return version.checkpoint_id

    return look


READERS: dict[str, Callable[[World], Callable[[], str]]] = {
    "restore": restoring,
    "follower": partial(following, copies=2),
    "follower of one copy": partial(following, copies=1),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("reader", "act"), some_of(itertools.product(READERS, ACTS), 0, 8))
def test_a_look(ended: World, tmp_path: Path, reader: str, act: str) -> None:
    whole, folder, facts = ended.root, ended.folder, ended.facts
    try:
        for at in itertools.count(step=EVERY):
            ended.folder, ended.root = tmp_path / str(at), tmp_path / str(at) / "root"
            ended.facts = deepcopy(facts)
            shutil.copytree(whole, ended.root)
            if not _is_right(ended, READERS[reader](ended), act, at):
                break
            ended.close_probe()
            shutil.rmtree(ended.folder)
        assert at > 10
    finally:
        ended.close_probe()
        ended.root, ended.folder, ended.facts = whole, folder, facts


def _is_right(of: World, look: Callable[[], str], act: str, at: int) -> bool:
    """Check a look amid which somebody acts, and the next one; return whether anybody did."""
    before, failed = of.facts.newest(), list[Exception]()

    def meanwhile() -> None:
        try:  # an error here would be taken for the storage's
            with of.processes.acting("another"):
                ACTS[act](of)
        except Exception as error:
            failed.append(error)

    with interrupted(at, meanwhile) as reached:
        found = look()
    assert failed == []
    known = of.facts.known
    for id, wanted in ((found, before), (look(), of.facts.newest())):
        assert wanted is not None
        # A follower that shows a checkpoint needs no compacted copy of it.
        assert known[id].sequence >= known[wanted].sequence
    return reached()
