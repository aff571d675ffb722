"""Kill commands that settle which checkpoints count, at each change that they make to the root.

    python -m tests.crash.repairing FOLDER before|half|after

A process of its own, whose forks have no other tests' threads and garbage.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args
from unittest import mock

from tests.crash.faulty_store import Faults, faulty_disk
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


def sweep(folder: Path, command: str, instant: Instant) -> int:
    """Kill a command at each change; return the number of kills.

    The checkpoints that counted must be left, or those that are to count; called again, the command
    must go on.
    """
    whole = Folder(folder / "whole")
    late = taken_over(whole, damaged=command.startswith("repair")).id
    rest(whole)
    before = counting(whole)
    kills = 0
    while True:
        root = Folder(shutil.copytree(whole.url, folder / f"after-{kills}"))
        rest(root)
        if not killed(partial(COMMANDS[command], root, late), Kill(kills + 1, instant)):
            break
        kills += 1
        found = counting(root)
        rest(root)
        COMMANDS[command](root, late)
        after = counting(root)
        assert found in (before, after), (command, kills, found)
        lease = Lease(root)
        lease.acquire(partial(counting_ids, root))
        lease.release()
    assert counting(root) == after
    assert after is not None
    assert (late in after[0]) == (command in ("repair", "adopt"))
    return kills


def main(folder: Path, instant: Instant) -> None:
    """Kill all commands, and print the number of kills of each."""
    with mock.patch.object(claims, "_PAUSE", 0.0):
        found = {}
        for number, command in enumerate(COMMANDS):
            (folder / str(number)).mkdir()
            found[command] = sweep(folder / str(number), command, instant)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), next(each for each in get_args(Instant) if each == sys.argv[2]))
