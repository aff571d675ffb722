"""Operate one root as people do, beside a reference that says what must come of each operation."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.save_sweep import alone
from tests.distributed.states import State, gather, scramble
from tests.unit.operations.lives import Compaction, Life, Processes
from tests.unit.operations.reference import Known, Reference
from tests.unit.run.deltas import expected
from torchrec_checknrun import Follower
from torchrec_checknrun.cli import main
from torchrec_checknrun.compaction.compact import compact_in
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckNRunError,
    ClaimDamaged,
    CorruptCheckpoint,
    StorageFailed,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, parse_id
from torchrec_checknrun.root import lineage
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.run.compaction import Copied
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tracking import TrackedModel

DAMAGE = (CorruptCheckpoint, ChainBroken)


class World:
    """A root, the run that writes to it, and what is known of both.

    Attributes:
        life: the run; None where none lives.
        hurt: whether somebody has taken from the run what it builds on, or its right to write.
        claims_hurt: whether claims were damaged since the last repair.
        log: what was done, for whoever looks into a failure.
    """

    def __init__(self, folder: Path, method: Any, options: dict[str, Any]) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.method, self.options = method, options
        self.keep: int | None = None
        self.facts = Reference()
        self.processes = Processes()
        self.life: Life | None = None
        self.hurt = self.claims_hurt = False
        self.log: list[str] = []
        self.seed = 0
        self._probe: Life | None = None
        self.follower: Follower | None = None
        self.direct: Life | None = None
        self.tracked: TrackedModel | None = None
        Compaction.compact = self._compact_behind

    # --- looking

    def manifests(self) -> dict[str, Path]:
        """Return the manifests that there are, by checkpoint."""
        return {path.parent.name: path for path in self.root.glob(f"*/{MANIFEST_NAME}")}

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Run the console tool; no error of it may be internal."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        code = ended.value.code or 0
        assert isinstance(code, int)
        said = out.getvalue(), err.getvalue()
        assert "internal error" not in said[1], (arguments, said)
        assert code in (0, 1, 2), (arguments, said)
        self.log.append(f"  {' '.join(map(str, arguments[:1] + arguments[2:]))}: {code} {said[1]}")
        return code, *said

    def json(self, *arguments: object) -> Any:
        """Run a command that must succeed; return what it prints."""
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, (arguments, err)
        return json.loads(out)

    def probe(
        self, id: str | None
    ) -> tuple[str, State, int] | CheckNRunError | StorageFailed | None:
        """Restore into another process's model; return what was restored, or the error."""
        if self._probe is None:
            self._probe = self.processes.start(self.root, 1, True)
        probe = self._probe
        scramble(probe.job)
        with self.processes.acting(probe.name):
            try:
                report = probe.saver.restore(id)
            except (CheckNRunError, StorageFailed) as error:
                return error
        if report is None:
            return None
        assert report.step == probe.saver.steps
        return report.id, gather(probe.job), probe.job.steps

    def close_probe(self) -> None:
        """Close the processes that look: their root is about to move."""
        self.follower = None
        if self._probe is not None:
            self.processes.end(self._probe)
            self._probe = None

    # --- noting

    def note(self, run: Life | None = None, counts: bool = True) -> list[str]:
        """Note what was committed since the last look; return the ids.

        Args:
            run: the one that has committed, if one has.
            counts: whether it was this root's writer.
        """
        found = self.manifests()
        new = [id for id in found if id not in self.facts.there]
        for id in sorted(new, key=lambda id: (read_manifest(Folder(self.root), id).sequence, id)):
            self.facts.there.add(id)
            if counts:
                self.facts.counting.add(id)
            if id not in self.facts.known:
                self.facts.known[id] = self._known(id, run)
        return new

    def _known(self, id: str, run: Life | None) -> Known:
        manifest = read_manifest(Folder(self.root), id)
        name = parse_id(id)
        if name is not None and name.is_copy:
            assert manifest.previous is not None
            original = self.facts.known[manifest.previous.id]
            return known(manifest, original.state, original.steps, original.original)
        assert run is not None, f"nobody was expected to commit {id}"
        live = gather(run.job)
        self.facts.known[id] = found = known(manifest, live, run.job.steps, id)
        there = self.probe(id)
        if isinstance(there, tuple):
            compare(id, there[1], self._restores_to(run, live), self.lossy)
            found.state, found.steps = there[1:]
        else:  # damage amid the chain, which saves don't look at; nobody can restore this one
            assert not self.facts.sound(id), (id, there)
        return found

    def _restores_to(self, run: Life, live: State) -> State:
        """Return what a restore of the run's last checkpoint gives, as far as that is known."""
        if self.method is None or self.method.method != "delta":
            return live
        found = {
            name.partition("[")[0]: v for name, v in expected(run.saver).items() if "/" not in name
        }
        rows = {f"model/{name}.weight": values for name, values in found.items()}
        return {name: rows.get(name, value) for name, value in live.items()}

    @property
    def lossy(self) -> bool:
        """Return whether rows are stored with a loss that is not known beforehand."""
        return self.method is not None and self.method.method != "delta"

    def gone(self) -> set[str]:
        """Note what was deleted since the last look; return the ids."""
        gone = self.facts.there - self.manifests().keys()
        self.facts.there -= gone
        self.facts.pins -= gone
        for ids in (self.facts.cut, self.facts.flipped):
            ids -= gone
        return gone

    @contextmanager
    def pruning(self, keep: int | None, by_run: bool = False) -> Iterator[None]:
        """Check that a pruning leaves what it must, and what a live run builds on.

        Args:
            keep: None: nothing is to be deleted.
            by_run: a run's own pruning, which leaves alone what does not count.
        """
        facts = self.facts
        yield
        must = facts.points() if keep is None else facts.must_stay(keep)
        stay = facts.there - facts.counting if by_run else set[str]()
        stay |= facts.there if keep is None else self.needed()
        gone = self.gone()
        assert not gone & stay, f"deleted: {gone & stay}"
        lost = must - facts.points()
        assert not lost, f"lost: {lost}, deleted: {gone}"

    def needed(self) -> set[str]:
        """Return what the next checkpoint of the live run may build on."""
        life = self.life
        if life is None or life.writer._lease is None or self.hurt:
            return set()
        history = {m.id for m in (*life.lineage.chain, *life.lineage.history[:1])}
        return history & self.facts.there

    # --- the run

    def start(self, choice: int = 0, **options: Any) -> Life:
        """Start a run; it restores nothing yet."""
        self.seed += 1
        retention = options.pop("retention", self.options.get("retention"))
        chosen = {**self.options, "retention": retention, "quantization": self.method, **options}
        self.keep = None if retention is None else retention.keep
        self.life = self.processes.start(
            self.root, 2 * self.seed + choice % 2, self.method is not None, **chosen
        )
        self.hurt = False
        return self.life

    def end(self) -> None:
        """End the run."""
        life, self.life = self.life, None
        if life is not None:
            self.processes.end(life)

    def train(self, life: Life, steps: int) -> None:
        with self.acting(life):
            for _ in range(steps):
                life.job.train()
                life.saver.step()

    @contextmanager
    def acting(self, life: Life) -> Iterator[None]:
        """Be the run's process."""
        numbers = dict(lineage._numbers)
        lineage._numbers.clear()
        with self.processes.acting(life.name):
            try:
                yield
            finally:
                lineage._numbers.clear()
                lineage._numbers.update(numbers)

    def _compact_behind(self, root: Folder, original: Manifest) -> Copied:
        try:
            report = compact_in(root, original.id)
        except (CheckNRunError, OSError):
            return Copied(original.id, None)
        return Copied(original.id, None if report is None else read_manifest(root, report.id))

    # --- the invariants

    def check(self) -> None:
        """Check everything that must hold after each operation."""
        facts = self.facts
        assert not self.manifests().keys() - facts.there, "unknown checkpoints"
        assert not facts.there - self.manifests().keys(), "checkpoints are gone"
        if not facts.there:
            return
        self._check_listing()
        self._check_newest()
        for id in facts.there:
            self._check_restore(id)

    def ask_what_counts(self) -> None:
        """Take what a listing says for what counts of checkpoints that come from another root."""
        listing = self.json("ls", self.root)
        for one in listing["checkpoints"]:
            if one["status"] == "ignored":
                self.facts.counting.discard(one["id"])
            elif one["id"] in self.facts.there:
                self.facts.counting.add(one["id"])
        if listing["problems"]:
            self.claims_hurt = True

    def _check_listing(self) -> None:
        facts, listed = self.facts, self.json("ls", self.root)["checkpoints"]
        status = {one["id"]: one["status"] for one in listed}
        for id in facts.there:
            usable = status[id] in ("restorable", "abandoned", "ignored", "undecided")
            assert usable == (facts.chain(id) is not None), (id, status[id])
            if usable and not self.claims_hurt:
                assert (status[id] == "ignored") == (id not in facts.counting), (id, status[id])
        pinned = {one["id"] for one in listed if one["pinned"]}
        assert pinned >= facts.pins & facts.there

    def _check_newest(self) -> None:
        found = self.probe(None)
        if self.claims_hurt:
            assert isinstance(found, (ClaimDamaged, tuple, *DAMAGE)), found
            return
        wanted, perhaps = self.facts.newest(), self.facts.newest(flipped=True)
        if wanted is None:
            assert isinstance(found, CheckNRunError) or perhaps is not None, found
            return
        assert isinstance(found, tuple), (found, wanted)
        known = self.facts.known
        assert known[wanted].place <= known[found[0]].place, (found[0], wanted)
        assert self.facts.chain(found[0]) is not None
        assert found[0] in self.facts.counting
        self._same(*found)

    def _check_restore(self, id: str) -> None:
        found = self.probe(id)
        if isinstance(found, tuple):
            assert found[0] == id
            self._same(*found)
            return
        assert isinstance(found, CheckNRunError), (id, found)
        refused = not self.facts.sound(id) or id not in self.facts.counting or self.claims_hurt
        assert refused, (id, found)

    def _same(self, id: str, state: State, steps: int) -> None:
        wanted = self.facts.known[id]
        compare(id, state, wanted.state, lossy=False)
        assert steps == wanted.steps, (id, steps, wanted.steps)


def known(manifest: Manifest, state: State, steps: int, original: str) -> Known:
    """Take down a checkpoint that was just committed."""
    parent, previous = manifest.parent, manifest.previous
    return Known(
        manifest.id,
        state,
        steps,
        manifest.sequence,
        None if parent is None else (parent.id, parent.checksum),
        None if previous is None else (previous.id, previous.checksum),
        (manifest.id, manifest.checksum),
        original,
        bool(manifest.deltas),
    )


def compare(id: str, found: State, wanted: State, lossy: bool) -> None:
    """Compare two states, bit for bit unless a table is stored with a loss."""
    assert found.keys() == wanted.keys(), id
    for name, value in wanted.items():
        other = found[name]
        if lossy and "embedding" in name:
            np.testing.assert_allclose(other, value, rtol=0.2, atol=0.05, err_msg=f"{id} {name}")
        else:
            assert other.tobytes() == value.tobytes(), (id, name)


@contextmanager
def world(folder: Path, method: Any, **options: Any) -> Iterator[World]:
    """Make a world without a root yet."""
    logging.disable(logging.CRITICAL)
    with alone(), pytest.MonkeyPatch.context() as patch:
        made = World(folder, method, options)
        made.processes.patch(patch)
        try:
            yield made
        finally:
            logging.disable(logging.NOTSET)
            for life in (made.life, made._probe):
                if life is not None:
                    life.saver._release(failed=True)


Action = Callable[[World, int], None]
