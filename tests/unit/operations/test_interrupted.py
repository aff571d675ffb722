"""Interrupt any command, and a run's save, at any call of the storage by any other: none is lost.

People and their jobs prune, pin, compact and publish beside a live run. Each trial carries one act
out wholly within another, at one instant of it.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.examples import examples, some_of
from tests.unit.interruption import interrupted
from tests.unit.operations import keeping, running
from tests.unit.operations.test_operations import METHODS
from tests.unit.operations.world import World, world
from torchrec_checknrun import Consecutive, Retention
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.store.folder import Folder

Act = Callable[[World], tuple[int, str, str]]

COMMANDS: dict[str, Act] = {
    "prune": lambda w: w.run("prune", w.root, "--keep", 1),
    "prune less": lambda w: w.run("prune", w.root, "--keep", 2),
    "pin": lambda w: w.run("pin", w.root, in_order(w)[-2]),
    "pin the newest but one": lambda w: w.run("pin", w.root, in_order(w)[1]),
    "unpin": lambda w: w.run("unpin", w.root, in_order(w)[-1]),
    "compact": lambda w: w.run("compact", w.root),
    "publish": lambda w: w.run("publish", w.root, published(w)),
    "publish one": lambda w: w.run("publish", w.root, published(w), "--keep", 1),
    "repair": lambda w: w.run("repair", w.root, "--yes"),
    "unlock": lambda w: w.run("unlock", w.root, "--yes"),
    "export": lambda w: w.run("export", w.root, w.folder / "exported"),
    "adopt": lambda w: w.run("adopt", w.root, in_order(w)[0], "--yes"),
}
PAIRS = [*itertools.product([name for name in COMMANDS if name != "adopt"], repeat=2)]
CALLS_OF = {"prune": 15, "pin": 5, "compact": 71, "publish one": 140, "export": 47, "repair": 13}
"""About as many calls of the storage each command makes beside a live run."""
LIVE = [*itertools.product(CALLS_OF, (True, False))]


def in_order(of: World) -> list[str]:
    """Return what was committed before the trial, the newest first."""
    return of.facts.in_order(of.facts.known)


def published(of: World) -> Path:
    return of.folder / "published"


def command(of: World, name: str, told: dict[str, int], process: str = "tool") -> None:
    """Carry a command out; note its exit code."""
    with of.processes.acting(process):
        told[name] = COMMANDS[name](of)[0]


def check(of: World, told: dict[str, int], last: str) -> None:
    """Check that the newest point and all that is pinned can be restored, and what was told.

    Args:
        last: the newest checkpoint, for which a compacted copy may stand.
    """
    root = Folder(of.root)
    chain, passed = newest(root)
    assert chain is not None
    assert last in (chain.head.id, of_copy(chain.head)), (chain.head.id, passed)
    pins = {path.parent.name for path in of.root.glob("*/pinned")}
    for id in pins:
        resolve(root, id)
    for name in ("pin", "pin the newest but one"):
        if told.get(name) == 0:
            assert in_order(of)[-2 if name == "pin" else 1] in pins
    code, out, error = of.run("verify", of.root)
    assert code == 0, (out, error)
    if 0 in (told.get("publish"), told.get("publish one")):
        code, out, error = of.run("verify", published(of))
        assert code == 0, (out, error)


def of_copy(manifest: Manifest) -> str | None:
    return None if manifest.previous is None else manifest.previous.id


@contextmanager
def begun(folder: Path) -> Iterator[World]:
    """Yield a world whose run has saved three checkpoints."""
    with world(folder, None, policy=Consecutive()) as made:
        for choice in (1, 2, 0):
            running.save(made, choice)
        yield made


def end(of: World) -> World:
    """End the run, and all that looks at its root: trials are on copies of it."""
    of.end()
    of.check()
    of.close_probe()
    return of


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return a root with chains, a fork, a pin and a compacted copy, whose run has ended."""
    with begun(tmp_path_factory.mktemp("ended")) as made:
        keeping.pin(made, 2)
        running.restart(made, 1)
        running.fall_back(made, 1)
        for choice in (1, 1):
            running.save(made, choice)
        made.end()
        keeping.compact(made, 0)
        running.restart(made, 0)
        running.save(made, 1)
        yield end(made)


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return a root whose newest checkpoints don't count: a replaced run has committed them."""
    with begun(tmp_path_factory.mktemp("replaced")) as made:
        running.take_over(made, 3)
        yield end(made)


def at_each_call(of: World, folder: Path, outer: str, inner: str) -> Iterator[dict[str, int]]:
    """Carry a command out within another one, at each call of the storage in turn, each time on a
    copy of the root; yield the exit codes by command.
    """
    whole, its_folder = of.root, of.folder
    try:
        for at in itertools.count():
            of.folder = folder / str(at)
            of.root = of.folder / "root"
            shutil.copytree(whole, of.root)
            told: dict[str, int] = {}
            with interrupted(at, partial(command, of, inner, told, "another")) as reached:
                command(of, outer, told)
            if not reached():
                break
            yield told
            shutil.rmtree(of.folder)
        assert at > 1
    finally:
        of.root, of.folder = whole, its_folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("outer", "inner"), some_of(PAIRS, 2, PAIRS.index(("pin", "prune"))))
def test_commands_within_commands(ended: World, tmp_path: Path, outer: str, inner: str) -> None:
    last = in_order(ended)[0]
    for told in at_each_call(ended, tmp_path, outer, inner):
        check(ended, told, last)


@pytest.mark.parametrize(
    ("outer", "inner"), some_of([("prune less", "adopt"), ("adopt", "prune less")], 0)
)
def test_what_is_told_to_count_stays(
    replaced: World, tmp_path: Path, outer: str, inner: str
) -> None:
    last, outcomes = in_order(replaced)[0], set()
    for told in at_each_call(replaced, tmp_path, outer, inner):
        outcomes.add((told["adopt"], told["prune less"]))
        if told["adopt"] == 0:
            check(replaced, told, last)
        assert 0 in told.values()
    assert {code for code, _ in outcomes} == {0, 2}


def save(of: World, saved: list[str]) -> None:
    """Let the run train a step and save."""
    life = of.life
    assert life is not None
    with of.acting(life):
        life.job.train()
        life.saver.step()
        saved.append(life.saver.save().id)
        life.writer.wait_for_pruning()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "is_outer"), some_of(LIVE, 1, 6))
def test_commands_beside_a_live_run(tmp_path: Path, name: str, is_outer: bool) -> None:
    draw = random.Random(f"{name} {is_outer}")
    reached = 0
    for trial in range(examples(40, quick=4)):
        keep = draw.choice((None, None, 1, 2))
        options = {"retention": None if keep is None else Retention(keep)}
        method = METHODS[draw.choice([*METHODS])]
        policy = None if method is METHODS["delta"] else Consecutive()
        with world(tmp_path / str(trial), method, policy=policy, **options) as made:
            for choice in (1, 2, 0):
                running.save(made, choice)
            told: dict[str, int] = {}
            saved: list[str] = []
            acts = [partial(command, made, name, told, "another"), partial(save, made, saved)]
            outer, inner = acts if is_outer else acts[::-1]
            with interrupted(draw.randrange(CALLS_OF[name] if is_outer else 19), inner) as found:
                outer()
            reached += found()
            for _ in range(2):  # and the run goes on
                if saved:
                    check(made, told, saved[-1])
                save(made, saved)
            check(made, told, saved[-1])
    assert reached > 1
