"""Keep what one rank has of a drawn program's lives, and compare it with what comes back."""

from __future__ import annotations

import pickle
import re
import shutil
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import lc_plain, references, states
from tests.distributed.drawn_programs.programs import OF_TABLES, OWN_BUFFERS, Ranked
from tests.distributed.layouts import Layout
from tests.distributed.serving import gathered, give_memory
from tests.programs.live import Live
from tests.unit.drawn_programs import nets
from tests.unit.drawn_programs.running import Cut, Outcome, Runs, differences_at_rest, everything
from tests.unit.drawn_programs.training import Training
from torchrec_checknrun import (
    Checkpointer,
    Follower,
    HostCopies,
    PartialRecovery,
    PerRank,
    PrioritySaves,
    Publish,
    Quantization,
    RestoreReport,
    Retention,
)
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.names import sequence_of
from torchrec_checknrun.memory.partial import PeerCopies
from torchrec_checknrun.schedule.triggers import AtEnd

CODECS: dict[str, Quantization | None] = {
    "8": Quantization(8, "asymmetric", exact_below_rows=0),
    "4": Quantization(4, "asymmetric", exact_below_rows=0),
    "delta": Quantization(
        method="delta", step=references.STEP, optimizer="fp32", exact_below_rows=0
    ),
    "lc": Quantization(3, "lc", exact_below_rows=0),
}
OF_RANKS = re.compile(
    r"embedding|generators|\.kept\b|fused|\.progress|_lookups|\.grad\b|layout|_replicate_params"
    r"|\._rank$"
)
"""Paths of what belongs to a rank or a layout."""
KERNEL = re.compile(r"\.kernel\d+")
"""The number of a kernel, which another layout may change though the rank has the same shards."""
LOOKUPS = re.compile(r"\.iter(_cpu)?$")
"""Paths of kernels' counters, which evaluations move: one after a step is done again."""


@dataclass
class RankCut(Cut):
    """A cut on one of several ranks.

    Attributes:
        layout: the ranks and shardings, as text.
        common: what was alike on all ranks.
    """

    layout: str
    common: Live


class Job:
    """A training's model and optimizers, for ``states.gather``."""

    def __init__(self, training: Training) -> None:
        self.model, self.optimizer = training.model, self
        self._all = training.optimizers
        self._over_all = training.program.over_all

    def state_dict(self) -> dict[str, Any]:
        own = [each for each in self._all.outer if each is not self._all.fused]
        # Of sharded tables that it doesn't step each rank has other empty states.
        outer = [] if self._over_all else [each.state_dict() for each in own]
        for each in outer:  # in the order of the rank's own parameters
            each.pop("param_groups", None)
        return {"state": self._all.fused.state_dict()["state"], "outer": outer}


class RankRuns(Runs):
    """One rank's lives of a run; what earlier ones have left is in files.

    Args:
        folder: of the run.
        layout: that of the life.
    """

    def __init__(self, ranked: Ranked, folder: Path, outcome: Outcome, layout: Layout) -> None:
        self._rank = dist.get_rank()
        super().__init__(ranked.program, folder, outcome)
        self.ranked, self.folder, self.layout = ranked, folder, layout
        self._copies = folder / "cuts"
        self._copies.mkdir(exist_ok=True)
        self._notes = folder / f"notes.{self._rank}.pickle"
        self._follower: Follower | None = None
        self.last: Live | None = None
        """The live state at the end of the last life, if that ended between turns."""
        for path in self._copies.glob("*.0.pickle"):
            id = path.name.removesuffix(".0.pickle")
            paths = sorted(self._copies.glob(f"{id}.*.pickle"))
            self.cuts[id] = pickle.loads(paths[min(self._rank, len(paths) - 1)].read_bytes())
        if self._notes.exists():
            self.done, self.last = pickle.loads(self._notes.read_bytes())

    def there(self) -> list[str]:
        manifests = sorted(self.root.glob("seq-*/manifest.json"))
        return [path.parent.name for path in manifests if path.parent.name in self.cuts]

    def note(self, training: Training) -> None:
        """Keep for the next life where this one ends."""
        assert self._saver is not None
        between = not self._saver._saver.gradients_wait
        self.last = everything(training) if between else None
        self._notes.write_bytes(pickle.dumps((self.done, self.last)))

    def options(self) -> dict[str, Any]:
        options, ranked = super().options(), self.ranked
        if options["partial"] is not None:
            options["partial"] = PartialRecovery(
                max_pls=1.0,
                total_steps=100,
                peers=PeerCopies() if ranked.peers else None,
                priority=PrioritySaves(2, fraction=0.5),
            )
        if ranked.hosted:
            options["survive"] = HostCopies(folder=str(self.memory))
        if ranked.closed:
            options["triggers"] = [AtEnd()]
        if ranked.codec:
            options["quantization"] = CODECS[ranked.codec]
        if ranked.retention is not None:
            options["retention"] = Retention(ranked.retention)
        options |= {"background": ranked.background, "memory_budget": ranked.budget}
        if ranked.published:
            options["publish"] = Publish(self.folder / "serve", every_seconds=1e6, bits=None)
        return options

    def training(self, seed: int, at: int) -> Training:
        return Training(self.program, seed, at, self.layout)

    def state(self, training: Training) -> dict[str, Any]:
        state = super().state(training)
        for number in range(len(training.schedules) if self.program.schedule in OF_TABLES else 0):
            state[f"schedule{number}"] = PerRank(state[f"schedule{number}"])
        if self.program.between in ("metric", "replay"):
            merge = {"metric": _all_samples}.get(self.program.between)
            state["kept"] = PerRank(state["kept"], merge=merge, lost="copy")
        return state

    def saver(self, training: Training, **options: Any) -> Checkpointer:
        if self.program.extra in OWN_BUFFERS:
            options["per_rank_buffers"] = "extra.*"
        return super().saver(training, **options)

    def cut(self, training: Training, id: str) -> None:
        """Keep a copy for this life, and for later ones in files."""
        found = everything(training)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        alike = {
            path: value
            for path, value in found.items()
            if not OF_RANKS.search(path)
            and not value.startswith("parameter ")  # lists of these are of the rank's own tables
            and all(of.get(path) == value for of in everyone)
        }
        cut = RankCut(found, training.place.position, str(self.layout), alike)
        self.cuts[id] = cut
        (self._copies / f"{id}.{self._rank}.pickle").write_bytes(pickle.dumps(cut))
        whole = states.gather(Job(training))
        if self._rank == 0:
            references.store(self._copies / f"{id}.npz", whole)

    def restored(self, training: Training, report: RestoreReport) -> None:
        """Compare what was restored with the state that the run had."""
        self.outcome.facts.append(f"from {report.source}")
        if report.source == "checkpoint":
            lines = self.lost_of(training, report.id)
        elif self.last is None:
            lines = []
        else:
            kept = not report.ranks or report.ranks[self._rank].source == "images"
            again = self.program.between == "swapped_after"
            sides = (everything(training), self.last)
            numbers = [set(KERNEL.findall("\n".join(of))) for of in sides]
            found, wanted = (
                {
                    p if numbers[0] == numbers[1] else KERNEL.sub(".kernel", p): v
                    for p, v in of.items()
                    if (kept or not OF_RANKS.search(p)) and not (again and LOOKUPS.search(p))
                }
                for of in sides
            )
            lines = differences_at_rest(found, wanted)
        self.outcome.lost += [f"restored from {report.source}: {line}" for line in lines]

    def lost_of(self, training: Training, id: str) -> list[str]:
        """Compare a training that was restored from a checkpoint with what was cut."""
        if id not in self.cuts:  # a compacted copy has its original's number
            (id,) = [each for each in self.cuts if sequence_of(each) == sequence_of(id)]
        cut = self.cuts[id]
        assert isinstance(cut, RankCut)
        if cut.layout == str(self.layout) and not self.ranked.codec:
            return differences_at_rest(everything(training), cut.live)
        found = everything(training)
        alike = {path: found.get(path, "(missing)") for path in cut.common}
        lines = differences_at_rest(alike, cut.common)
        whole = states.gather(Job(training))
        wanted = references.load(self._copies / f"{id}.npz")
        links = references.links_of(self.root, id)
        if links == "lc":
            rows, problems = lc_plain.restored(self.root, self._copies, id)
            wanted |= rows
            lines += problems
        bits = None if links else references.narrowest_bits(self.root, id)
        return lines + references.differences(whole, wanted, bits, links == "delta")

    def _note(self, training: Training, saver: Checkpointer) -> None:
        super()._note(training, saver)
        if self.ranked.published and (training.place.position + self.ranked.plan) % 2:
            self._publish(training, saver)
            super()._note(training, saver)  # a checkpoint that was put off goes first

    def _publish(self, training: Training, saver: Checkpointer) -> None:
        """Publish, and compare what a follower serves with what is trained."""
        report, whole = saver.publish(), gathered(training.model)
        self.outcome.facts.append("put off" if report is None else f"published {report.kind}")
        if report is None or self._rank:
            return
        if self._follower is None:
            tables = nets.embeddings(self.program)[0]
            give_memory(tables)
            with torch.random.fork_rng(devices=[]):
                net = nets.Net(self.program, tables)
            self._follower = Follower(self.folder / "serve", net)
        version = self._follower.poll()
        assert version is not None, "nothing new is served"
        assert version.error is None, version.error
        with self._follower.read() as (model, _):
            served = model.state_dict()
            lost = [name for name, value in served.items() if _bytes(value) != _bytes(whole[name])]
        served_at = f"served at {report.step} by {version.step}"
        self.outcome.lost += [f"{served_at}: {name}" for name in lost]

    def close(self, training: Training, saver: Checkpointer) -> None:
        """End a life as its program does, with a checkpoint."""
        before = len(self.committed)
        with suppress(SaveFailed) if self.ranked.fails else nullcontext():
            saver.close()
        self._saver = None
        if len(self.committed) > before and self.committed[-1].id not in self.cuts:
            self.cut(training, self.committed[-1].id)

    def lose_images(self) -> None:
        dist.barrier()
        if self._rank == 0:
            for path in self.memory.iterdir():
                if self.ranked.lost == "all" or f"-{dist.get_world_size() - 1}of" in path.name:
                    path.unlink() if path.is_file() else shutil.rmtree(path)
        dist.barrier()

    def tear(self, training: Training) -> None:
        """Leave the ranks at different points of a turn that has begun."""
        if not self.program.torn:
            return
        if self.ranked.torn == "ahead":
            training.turn(self._saver)
            assert self._saver is not None
            if self._rank == 0:
                self._saver._survival.end_step(self._saver.steps + 1)
            return
        training.tear()
        if self.ranked.torn == "apart" and self._rank == 0:
            training.optimizers.step()


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _all_samples(states: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[int, int] = {}
    for state in states:
        for value, count in state["counts"].items():
            counts[value] = counts.get(value, 0) + count
    return {"seen": [each for state in states for each in state["seen"]], "counts": counts}
