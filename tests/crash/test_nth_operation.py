"""Every operation of a save, a compaction and a pruning fails once, for ever, half-way, and so on.

`make test` takes a part of the operations, the slow tests take all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.chain_sweep import ChainSweep
from tests.crash.faulty_store import Faults, Mode, faulty_disk, patience
from tests.crash.save_sweep import Phase, Sweep, alone, faulty_roots
from torchrec_checknrun.store.folder import Folder

STRIDE = 24
"""Distance of the operations that `make test` takes; each mode begins with another one."""

Where = tuple[Faults, Callable[[], str]]


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Where]:
    with alone(), faulty_roots(tmp_path if request.param == "disk" else None) as found:
        yield found


def check_saves(where: Where, phase: Phase, stride: int) -> None:
    sweep = Sweep(*where, phase)
    for number, mode in enumerate(Mode):
        tally = sweep.run(mode, 1 + 5 * number % stride, stride)
        assert not tally.lost
        assert tally.surfaced + tally.healed == len(
            range(5 * number % stride, tally.operations, stride)
        )


def check_chains(where: Where, work: str, stride: int) -> None:
    sweep = ChainSweep(*where)
    for number, mode in enumerate(Mode):
        tally = sweep.run(work, mode, 1 + 5 * number % stride, stride)
        assert not tally.lost


@pytest.mark.parametrize("phase", Phase)
def test_saves(where: Where, phase: Phase) -> None:
    check_saves(where, phase, STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase)
def test_saves_at_every_operation(where: Where, phase: Phase) -> None:
    check_saves(where, phase, 1)


@pytest.mark.parametrize("work", ["compact", "prune"])
def test_compactions_and_prunings(where: Where, work: str) -> None:
    check_chains(where, work, STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["compact", "prune"])
def test_compactions_and_prunings_at_every_operation(where: Where, work: str) -> None:
    check_chains(where, work, 1)


def test_a_put_of_which_the_answer_was_lost_is_made_durable(tmp_path: Path) -> None:
    """Sync the entry in the folder too, although another try finds the file there already."""
    faults, folder = Faults(), Folder(tmp_path)
    with faulty_disk(faults), patience(Mode.LOST_BUSY):
        faults.arm(1, None)
        folder.put("counted", b"data", new=True)
        names = [o.name for o in faults.asked_for if o.can_fail(Mode.LOST_BUSY)]
        for number in (names.index("link") + 1, names.index("fsync of a folder") + 1):
            faults.arm(number, Mode.LOST_BUSY)
            folder.put(f"lost{number}", b"data", new=True)
            after = [o.name for o in faults.asked_for][
                faults.asked_for.index(faults.failed[0]) + 1 :
            ]
            assert "fsync of a folder" in after


def test_a_compaction_never_puts_an_older_state_before_the_newest(where: Where) -> None:
    """Fail while the newest checkpoint can't be read."""
    tally = ChainSweep(*where).run("compact", Mode.ONCE, start=3, stride=1000)
    assert tally.surfaced == tally.injected == 1
    assert not tally.lost
