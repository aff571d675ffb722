"""Damage every file of a root in every way, control records included, and use all readers.

Allowed: an error, or the restore of an older checkpoint with a warning, and ``verify`` reports the
damage; or the restored state is unaffected. Never a fresh start, never other rows, and pruning
never deletes the only good checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.campaign import forks
from tests.campaign.damage_kinds import Damage, all_damages, apply
from tests.campaign.kill_plan import RANKS, Trial, draw
from tests.campaign.kill_rank import Run, join
from tests.campaign.outcome import Outcome
from tests.campaign.record import Record, Values, values_of
from tests.distributed import lc_bound, references
from tests.distributed.states import Part, State, gather, scramble
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import CheckNRunError
from torchrec_checknrun.format import reader as read_chunks
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.checkpoints import committed, read_manifest
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, pin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify


class Blocks:
    """Some state that is split over the ranks: a tensor of seven rows."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.tensor = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]

    def part(self) -> Part:
        """Return this rank's rows."""
        rows = self.tensor.to_local()
        before = [len(piece) for piece in torch.zeros(7).chunk(dist.get_world_size())]
        return Part("state/blocks", (7, 3), (sum(before[: dist.get_rank()]), 0), rows)


class BlocksRun(Run):
    """A run with blocks among its states."""

    def states(self) -> dict[str, Any]:
        """Return the state objects, including the blocks."""
        self.blocks = Blocks()
        return {**super().states(), "blocks": self.blocks}

    def train(self) -> None:
        """Train a step, and change the blocks."""
        super().train()
        with torch.no_grad():
            rows = self.blocks.tensor.to_local()
            rows.copy_(torch.arange(rows.numel()).reshape(rows.shape) + self.job.steps)

    def values(self) -> Values:
        """Copy all of this rank's state."""
        return {**super().values(), **values_of([self.blocks.part()])}


def _with(trial: Trial, policy: str) -> Trial:
    return Trial(**{**vars(trial), "policy": policy, "keep": None, "every_steps": 100})


def _trial(seed: int, links: str) -> Trial:
    trial = draw(f"{seed}/damage", 0)
    chosen = {"sharding": "row_wise", "options": {}, "torchrun": False, "links": links}
    return Trial(**{**vars(trial), **chosen})


def prepare(seed: int, folder: Path, links: str = "") -> None:
    """Make the root and another one, each by three jobs of two ranks.

    Args:
        links: the method that stores rows as differences; empty: rows are whole.
    """
    for name, own_seed in (("root", seed), ("other", seed + 1)):
        (folder / f"record-{name}").mkdir()
        for policy, saves in (("consecutive", 3), ("full", 1), ("consecutive", 1)):
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen(64)
                logs = [folder / f"log-{name}-{rank}" for rank in range(RANKS)]
                write = partial(_write, own_seed, links, folder, name, policy, saves, listener)
                pids = [forks.child(partial(write, rank), logs[rank]) for rank in range(RANKS)]
            if sum(os.waitpid(pid, 0)[1] for pid in pids):
                raise RuntimeError("\n".join(map(forks.tail, logs)))
    pin(Folder(folder / "root"), committed(Folder(folder / "root"))[1])


def _write(
    seed: int,
    links: str,
    folder: Path,
    name: str,
    policy: str,
    saves: int,
    listener: socket.socket,
    rank: int,
) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, listener)
    run = BlocksRun(_with(_trial(seed, links), policy), str(folder / name), RANKS)
    run.job.data_seed = int(name == "other")
    run.saver.restore()
    record = Record(folder / f"record-{name}", rank)
    for _ in range(saves):
        run.train()
        run.saver.step()
        record.note(run.job.steps, 0, run.values())
        run.saver.save()
    if rank == 0:  # leave the claims as they are while their holder lives
        (folder / "other" / "older").mkdir(parents=True, exist_ok=True)
        for claim in (folder / name / "writers").iterdir():
            shutil.copy(claim, folder / "other" / "older" / claim.name)
    dist.barrier()
    run.saver.close()


def count(prepared: Path) -> int:
    """Return the number of damages."""
    return sum(1 for _ in all_damages(prepared / "root"))


def run(
    seed: int, first: int, number: int, folder: Path, prepared: Path, links: str = ""
) -> Outcome:
    """Try a range of the damages.

    Args:
        prepared: see ``prepare``, with the same ``links``.
    """
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = _Bench(seed, folder, prepared, links)
    outcome = Outcome()
    damages = list(all_damages(prepared / "root"))
    with (
        mock.patch.object(read_chunks, "VISIBLE_SECONDS", 0.0),
        mock.patch.dict(os.environ, {"CHECKNRUN_RETRY_SECONDS": "0.2"}),
    ):
        for at in range(first, min(first + number, len(damages))):
            bench.try_one(at, damages[at], outcome)
    return outcome


class _Bench:
    """A reader, and the record of the states that are right."""

    def __init__(self, seed: int, folder: Path, prepared: Path, links: str) -> None:
        self._seed = seed
        self._links = links
        self._prepared = prepared
        self._root, self._other = folder / "damaged", folder / "other"
        sound = Folder(prepared / "root")
        ids = [name for name in committed(sound) if (sound / name).size(MANIFEST_NAME)]
        self._steps = {id: read_manifest(sound, id).step for id in ids}
        self._head = ids[0]
        record = Record(prepared / "record-root", 0)
        steps = self._steps.values()
        self._wanted = {step: _without(record.whole(step, 0, RANKS)) for step in steps}
        trial = _with(_trial(seed, links), "consecutive")
        self._reader = BlocksRun(trial, str(self._root), 1)
        if links == "lc":
            self._take_as_restored()

    def _take_as_restored(self) -> None:
        """Expect the rows that the sound root restores to, which are near the recorded ones."""
        shutil.copytree(self._prepared / "root", self._root, symlinks=True)
        for id, step in self._steps.items():
            with _checkpointer(self._reader, self._root) as saver:
                saver.restore(id)
            found, recorded = self._found(), self._wanted[step]
            problems = lc_bound.beside_tables(found, recorded)
            assert not problems, problems
            self._wanted[step] = found

    def try_one(self, number: int, damage: Damage, outcome: Outcome) -> None:
        """Damage a copy of the root in one way, and use every reader."""
        for name, path in (("root", self._root), ("other", self._other)):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self._prepared / name, path, symlinks=True)
        apply(damage, self._root, self._other, random.Random(f"{self._seed}/{number}"))
        outcome.counts["damages"] += 1
        outcome.counts[f"damage: {damage.how}"] += 1

        def fail(kind: str, what: str) -> None:
            outcome.fail(number, kind, f"{what} [{damage}]")

        told = self._verify(fail)
        at, words = self._restore(fail, outcome)
        self._judge(damage, told, at, words, fail, outcome)
        # Pruning reads no rank files: keep another checkpoint beside one that only looks complete.
        keep = 2 if damage.of_checkpoint and not damage.path.endswith(MANIFEST_NAME) else 1
        try:
            prune(Folder(self._root), Retention(keep))
        except (CheckNRunError, OSError):
            outcome.counts["prunings refused"] += 1
        except Exception as error:
            fail("error", f"prune: {error!r}")
        after, _ = self._restore(lambda kind, what: fail(kind, f"after prune: {what}"), outcome)
        if at is not None and after != at:
            fail("lost", f"a pruning: before it {at} was restored, after it {after}")
        if at is None and not self._some_left(damage.path.partition("/")[0]):
            fail("lost", "a pruning has deleted all checkpoints that could be restored")

    def _verify(self, fail: Callable[[str, str], None]) -> str:
        try:
            return " ".join(p for found in verify(self._root) for p in found.problems)
        except (CheckNRunError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            fail("error", f"verify: {error!r}")
            return repr(error)

    def _restore(
        self, fail: Callable[[str, str], None], outcome: Outcome
    ) -> tuple[str | None, str]:
        """Restore the newest checkpoint; return its id, if any, and the warnings."""
        reader = self._reader
        scramble(reader.job)
        reader.history.steps = []
        reader.blocks.tensor.to_local().fill_(-1)
        try:
            with _checkpointer(reader, self._root) as saver:
                report = saver.restore()
        except (CheckNRunError, OSError) as error:
            outcome.counts[f"restores refused: {type(error).__name__}"] += 1
            return None, f"{type(error).__name__}: {error}"
        except Exception as error:
            fail("error", f"restore: {error!r}")
            return None, repr(error)
        if report is None:
            fail("lost", "a fresh start")
            return None, ""
        outcome.counts["restores compared"] += 1
        found, wanted = self._found(), self._wanted[report.step]
        for difference in references.differences(found, wanted, None, self._links == "delta"):
            fail("silent", f"restored {report.id}: {difference}")
        return report.id, " ".join(report.passed_over)

    def _found(self) -> State:
        found = gather(self._reader.job)
        values = self._reader.values()
        return found | {n: v for (n, _), (_, v) in values.items() if n.startswith("state/")}

    def _judge(
        self,
        damage: Damage,
        told: str,
        at: str | None,
        words: str,
        fail: Callable[[str, str], None],
        outcome: Outcome,
    ) -> None:
        owner = damage.path.partition("/")[0]
        if (
            at is not None
            and self._steps.get(at, self._steps[self._head]) == self._steps[self._head]
        ):
            outcome.counts["the newest restored exactly"] += 1
            silent = damage.of_checkpoint and damage.how != "copied beside" and not told
            silent = silent and not self._is_same_content(damage.path)
            if silent and (not damage.uncommits or self._is_needed(owner)):
                fail("silent", "verify says nothing")
            return
        if at is None:
            outcome.counts["restores refused"] += 1
        elif damage.uncommits and owner == self._head:
            outcome.counts["the one before an uncommitted one restored"] += 1
            return
        else:
            outcome.counts["an older one restored with a word"] += 1
            if owner not in words:
                fail("silent", f"restored {at}, and only said: {words}")
        if not told:
            fail("silent", "verify says nothing")

    def _is_same_content(self, path: str) -> bool:
        """Return whether a damaged manifest says what the sound one does: 1E-08 for 1e-08."""
        if not path.endswith(f"/{MANIFEST_NAME}"):
            return False
        try:
            sound, damaged = (
                json.loads((root / path).read_bytes())
                for root in (self._prepared / "root", self._root)
            )
        except (ValueError, OSError):
            return False
        return bool(sound == damaged)

    def _is_needed(self, id: str) -> bool:
        """Return whether another checkpoint builds on this one."""
        sound = Folder(self._prepared / "root")
        parents = [read_manifest(sound, name).parent for name in self._steps]
        return any(parent is not None and parent.id == id for parent in parents)

    def _some_left(self, owner: str) -> bool:
        """Return whether a checkpoint can be restored once the damage is undone."""
        sound, damaged = self._prepared / "root" / owner, self._root / owner
        if owner and (owner == "writers" or damaged.exists()):
            if damaged.is_symlink() or damaged.is_file():
                damaged.unlink()
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(sound, damaged)
        return self._restore(lambda kind, what: None, Outcome())[0] is not None


def _without(state: State) -> State:
    return {name: value for name, value in state.items() if not name.startswith("own/")}


def _checkpointer(run: Run, root: Path) -> Checkpointer:
    return run.trial.checkpointer(str(root), model=run.job.model, state=run.declared)
