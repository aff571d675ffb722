"""Kill commands that settle which checkpoints count, at each change that they make to the root."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import pytest

from tests.crash.faulty_store import Faults, faulty_disk
from tests.examples import some_of
from tests.unit.root.commits import commit
from tests.unit.writers.test_claims import OTHER, age, put
from torchrec_checknrun.errors import ClaimDamaged
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.root.retention import PINNED, pin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.writers import claims
from torchrec_checknrun.writers.claims import FOLDER, Claim, latest_claim
from torchrec_checknrun.writers.lease import Lease

T = TypeVar("T")
Instant = Literal["before", "half", "after"]
Counting = tuple[set[str], str | None] | None

COMMANDS: dict[str, Callable[[Folder, str], object]] = {
    "repair": lambda root, late: takeover.repair(root),
    "repair --ignore": lambda root, late: takeover.repair(root, [late]),
    "adopt": lambda root, late: takeover.adopt(root, [late]),
    "unlock": lambda root, late: takeover.unlock(root),
}


class Kill(Faults):
    """The end of this process at one change of the storage.

    Args:
        at: the number of the change, counted from 1.
    """

    def __init__(self, at: int, instant: Instant) -> None:
        super().__init__()
        self._left, self._instant = at, instant

    def _carry_out(
        self,
        name: str,
        act: Callable[[], T],
        changes: bool,
        half: Callable[[], object] | None,
    ) -> T:
        self._left -= changes
        if not changes or self._left:
            return act()
        try:
            if self._instant == "after":
                act()
            elif self._instant == "half" and half is not None:
                half()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


def taken_over(root: Folder, damaged: bool) -> Manifest:
    """Make a root that a second writer has taken over; return the checkpoint that doesn't count."""
    root.create()
    (root / FOLDER).create()
    first = commit(root, 1)
    put(root, Claim(1, OTHER, earlier=(), released=True))
    late = commit(root, 1)
    put(root, Claim(2, OTHER, earlier=(first.id,), uses=(first.id,), released=True))
    commit(root, 2)
    pin(root, first.id)
    if damaged:
        put(root, Claim(2, OTHER), b"junk")
        (root / first.id).put(PINNED, b"junk")
    return late


def rest(root: Folder) -> None:
    """Let the root's claims be those of writers that have ended long ago."""
    age(root, *(root / FOLDER).names())


def counting(root: Folder) -> Counting:
    """Return the checkpoints that count, and the one that a restore takes; None: a claim can't
    tell.
    """
    try:
        chain, _ = newest(root)
        ids = set(counting_ids(root, latest_claim(root)))
    except ClaimDamaged:
        return None
    return ids, None if chain is None else chain.head.id


def killed(act: Callable[[], object], kill: Kill) -> bool:
    """Act in a fork of this process; return whether it was killed before the end."""
    process = os.fork()
    if not process:
        code = 1
        try:
            with faulty_disk(kill):
                act()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("instant", some_of(["before", "half", "after"], 1))
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_decision_is_made_or_not(
    command: str, instant: Instant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the checkpoints that counted, or those that are to count; go on when called again."""
    monkeypatch.setattr(claims, "_PAUSE", 0.0)
    whole = Folder(tmp_path / "whole")
    late = taken_over(whole, damaged=command.startswith("repair")).id
    rest(whole)
    before = counting(whole)
    kills = 0
    while True:
        root = Folder(shutil.copytree(whole.url, tmp_path / f"after-{kills}"))
        rest(root)
        if not killed(partial(COMMANDS[command], root, late), Kill(kills + 1, instant)):
            break
        kills += 1
        found = counting(root)
        rest(root)
        COMMANDS[command](root, late)
        after = counting(root)
        assert found in (before, after)
        lease = Lease(root)
        lease.acquire(partial(counting_ids, root))
        lease.release()
    assert kills >= 5
    assert counting(root) == after
    assert after is not None
    assert (late in after[0]) == (command in ("repair", "adopt"))
