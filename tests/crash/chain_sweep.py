"""Fail one operation of a compaction or a pruning, each in turn, and judge what the storage holds.

The chains are made by hand: no model is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from msgspec.structs import replace

from tests.crash.faulty_store import Faults, Mode, Operation, patience
from tests.crash.save_sweep import Tally
from tests.unit.chains import DIM, Part, make_shards, restore, same_bits, write, write_chain
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root import deletion
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import LocalShard, Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.lease import FOLDER

ROWS = 30
PLACE = Rectangle(0, ROWS, 0, DIM)


class ChainSweep:
    """A chain in faulty storage, put there anew for each case."""

    def __init__(self, faults: Faults, new_root: Callable[[], str]) -> None:
        self._faults = faults
        self._new_root = new_root

    def run(self, work: str, mode: Mode, start: int = 1, stride: int = 1) -> Tally:
        """Fail every ``stride``-th operation of ``compact`` or ``prune`` that way."""
        act = {"compact": self._compact, "prune": self._prune}[work]
        operations = act(0, Mode.ONCE, Tally())
        tally = Tally(sum(operation.can_fail(mode) for operation in operations))
        with patience(mode):
            for number in range(start, tally.operations + 1, stride):
                try:
                    act(number, mode, tally)
                except Exception as error:
                    tally.lost.append(f"{work}, operation {number} fails {mode.value}: {error!r}")
        return tally

    def _work(
        self, act: Callable[[], object], number: int, mode: Mode, tally: Tally, what: str
    ) -> tuple[list[Operation], OSError | None]:
        """Act with a fault, and count the outcome."""
        told: OSError | None = None
        self._faults.arm(number, mode if number else None)
        try:
            act()
        except OSError as error:
            told = error
        finally:
            self._faults.disarm()
        failed = self._faults.failed
        tally.injected += len(failed)
        tally.surfaced += told is not None
        tally.healed += bool(number) and told is None
        case = f"{what}, operation {number} ({failed[:1]}) fails {mode.value}"
        if number and not failed:
            tally.lost.append(f"{case}: nothing failed")
        if mode.transient and told is not None and not failed[0].streams:
            tally.lost.append(f"{case}: it was not healed: {told}")
        return self._faults.asked_for, told

    def _compact(self, number: int, mode: Mode, tally: Tally) -> list[Operation]:
        root = Folder(self._new_root())
        root.create()
        all_rows = [Part((0, DIM), list(range(ROWS)), 10)]
        parts = [[Part((0, DIM), list(range(age, ROWS, 5)), 10)] for age in (1, 2)]
        head = write_chain(root, ROWS, [all_rows, *parts])
        wanted = _restored(root, head)
        asked_for, told = self._work(lambda: compact(root.url), number, mode, tally, "compact")
        case = f"compact, operation {number} fails {mode.value}"
        chain, problems = newest(root)
        tally.new += chain is not None and len(chain.manifests) == 1
        if told is None and (chain is None or len(chain.manifests) > 1):
            problems.append("no error was told, and nothing compacted")
        if not _equal(wanted, _restored(root, head)):
            problems.append("the chain's rows differ")
        if chain is None or not _equal(wanted, _restored(root, chain.head.id)):
            problems.append("the newest one's rows differ")
        if chain is None or len(chain.manifests) > 1:
            compact(root.url)
        # What is left of the compaction that failed goes with a pruning, a minute later.
        with mock.patch.object(deletion, "is_abandoned", return_value=True):
            prune(root, Retention(1))
        left = [name for name in root.names() if name != FOLDER]
        if len(left) != 1 or not _equal(wanted, _restored(root, left[0])):
            problems.append(f"after another compaction and a pruning {left} are left")
        problems += [problem for found in verify(root.url) for problem in found.problems]
        tally.lost += [f"{case}: {problem}" for problem in problems]
        return asked_for

    def _prune(self, number: int, mode: Mode, tally: Tally) -> list[Operation]:
        root = Folder(self._new_root())
        root.create()
        full = [Part((0, DIM), list(range(ROWS)), 10)]
        some = [Part((0, DIM), list(range(0, ROWS, 3)), 10)]
        first = write(root, ROWS, full)
        second = write(root, ROWS, some, first)
        third = _full(root, second)
        head = write(root, ROWS, some, third)
        (root / "seq-000002_step-00000007_00000abc").create()
        (root / "seq-000002_step-00000007_00000abc").put("rank-00000.bin", b"half")
        wanted = _restored(root, head.id)
        asked_for, told = self._work(
            lambda: prune(root, Retention(1)), number, mode, tally, "prune"
        )
        problems = []
        there = [n for n in committed(root) if (root / n).size(MANIFEST_NAME) is not None]
        tally.new += len(there) == 2
        if told is None and len(there) != 2:
            problems.append(f"no error was told, and {there} are there")
        chain, passed_over = newest(root)
        problems += passed_over
        if chain is None or chain.head.id != head.id:
            problems.append("the newest one is gone")
        problems += [problem for found in verify(root.url) for problem in found.problems]
        if not _equal(wanted, _restored(root, head.id)):
            problems.append("the newest one's rows differ")
        prune(root, Retention(1))
        if root.names() != sorted([third.id, head.id]):
            problems.append(f"after another pruning {root.names()} are left")
        case = f"prune, operation {number} fails {mode.value}"
        tally.lost += [f"{case}: {problem}" for problem in problems]
        return asked_for


def _full(root: Folder, before: Manifest) -> Manifest:
    """Write a full checkpoint after another one."""
    made = write(root, ROWS, [Part((0, DIM), list(range(ROWS)), 10)], before)
    (root / made.id).delete(MANIFEST_NAME)
    full = replace(made, kind="full", parent=None).sealed()
    (root / made.id).put(MANIFEST_NAME, full.to_bytes())
    return full


def _restored(root: Folder, head: str) -> LocalShard:
    shards = make_shards(ROWS, [PLACE])
    restore(root, head, shards)
    return shards[0]


def _equal(one: LocalShard, other: LocalShard) -> bool:
    return same_bits(one.weight, other.weight) and all(
        same_bits(one.optimizer[name], other.optimizer[name]) for name in one.optimizer
    )
