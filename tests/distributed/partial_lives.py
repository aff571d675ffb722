"""Let the ranks of a run with images die together, some of them with their images, and go on.

Each life is a new job with a new Checkpointer; a rank dies as a killed process does: nothing is
closed or saved.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.distributed.models import CollectionSpec, Job, ModelSpec, Plan, TableSpec
from tests.distributed.states import local_bytes
from torchrec_checknrun import Checkpointer, Consecutive, Images, PartialRecovery, PerRank
from torchrec_checknrun.memory.image import RankImage
from torchrec_checknrun.memory.partial import PeerCopies, PrioritySaves
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.store.folder import Folder

EVERY = 4
"""Steps from one checkpoint to the next."""
TOTAL = 100
TABLES = (
    TableSpec("parts", 20_000, 32, ("f0",)),
    TableSpec("more", 8_000, 16, ("f1", "f0")),
    TableSpec("copies", 50, 8, ("f2",)),
)
SPEC = ModelSpec((CollectionSpec("c", TABLES),), dense="adam")
PLAN = {"c.parts": "row_wise", "c.more": "row_wise", "c.copies": "data_parallel"}
SHARDED = ("embedding_bags.parts", "embedding_bags.more", "embedding_bags.alone")

LONELY = ModelSpec(
    (CollectionSpec("c", (*TABLES[:1], TableSpec("alone", 3_000, 16, ("f3",)))),), dense="adam"
)
LONELY_PLAN = {"c.parts": "row_wise", "c.alone": "table_wise:1"}


@dataclass
class Reader:
    """A position in the data, each rank's own."""

    position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Dice:
    """A generator of each rank's own."""

    generator: torch.Generator = field(default_factory=torch.Generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Gathered:
    """A state that the ranks gather when they are asked, and rank 0 alone shows, as PyTorch's
    ``get_state_dict`` with ``full_state_dict`` and ``cpu_offload`` does.
    """

    def __init__(self) -> None:
        self.part = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        whole = [torch.empty(2) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, self.part)
        return {"whole": {"parts": torch.cat(whole)} if dist.get_rank() == 0 else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if parts := state["whole"]:
            self.part = parts["parts"].view(-1, 2)[dist.get_rank()].clone()


def advanced(saved: dict[str, Any], steps: int) -> dict[str, Any]:
    """The rule of the reader: two samples a step."""
    return {"position": saved["position"] + 2 * steps}


class Lives:
    """The lives of one run on this rank.

    Args:
        folder: holds the checkpoints.
        memory: holds the images; in shared memory.
        max_pls: None: no partial recovery.
        ruled: whether the states of each rank's own have rules.
        peers: copies in other ranks' memory.
        priority: rows saved between checkpoints.
        beside: makes more states of a life.
    """

    def __init__(
        self,
        folder: str,
        memory: str,
        max_pls: float | None = 1.0,
        ruled: bool = True,
        spec: ModelSpec = SPEC,
        plan: Plan | None = None,
        peers: PeerCopies | None = None,
        priority: PrioritySaves | None = None,
        beside: Callable[[], dict[str, Any]] = dict,
        **options: Any,
    ) -> None:
        self.root, self.memory = Path(folder) / "root", memory
        self._ruled, self._options, self._beside = ruled, options, beside
        self._spec, self._plan = spec, PLAN if plan is None else plan
        self._partial = (
            None if max_pls is None else PartialRecovery(max_pls, TOTAL, peers, priority)
        )
        self._number = 0
        self._left: list[Any] = []

    def begin(self, images: bool = True) -> None:
        """Make a job of other weights, its states and its Checkpointer, in a new life."""
        files._mapped.clear()
        self._number += 1
        rank = dist.get_rank()
        self.job = Job.build(self._spec, self._plan, seed=self._number, samples=200)
        self.reader, self.dice = Reader(), Dice()
        self.dice.generator.manual_seed(1000 * self._number + rank)
        reader = PerRank(self.reader, lost=advanced if self._ruled else None)
        self.saver = Checkpointer(
            self.root,
            model=self.job.model,
            state={
                "optimizer": self.job.optimizer,
                "job": self.job,
                "reader": reader,
                "dice": PerRank(self.dice, lost="copy"),
                **self._beside(),
            },
            every_steps=EVERY,
            when_busy="wait",
            retention=None,
            survive=Images(folder=self.memory) if images else None,
            partial=self._partial if images else None,
            **{"policy": Consecutive(), **self._options},
        )
        self._left.append((self.job, self.saver))

    def train(self, steps: int) -> None:
        """Train, and end with every checkpoint committed that was begun."""
        for _ in range(steps):
            self.job.train()
            self.reader.position += 2
            torch.rand(3, generator=self.dice.generator)
            self.saver.step()
        self.saver.wait()

    def die(self, lost: list[int], machines: bool = False) -> None:
        """Die on all ranks; the images of some are gone.

        Args:
            machines: whether everything else that these ranks had in memory is gone, too.
        """
        path = self.image.path
        self.saver._release(failed=True)
        dist.barrier()
        if dist.get_rank() in lost:
            path.unlink()
            if machines:
                shutil.rmtree(path.with_suffix(".copies"))
        dist.barrier()
        gc.collect()

    @property
    def image(self) -> RankImage:
        image = self.saver._survival._image
        assert image is not None
        return image

    def values(self) -> dict[str, bytes]:
        """Copy this rank's state, as bytes."""
        return local_bytes(self.job)

    def end(self) -> None:
        """Go on with the run to its end, which removes the images."""
        self.train(1)
        self.saver.close()


def end_as_killed(saver: Checkpointer, memory: str, lost: int | None) -> None:
    """Leave images as a kill of all ranks does, without that of a lost rank."""
    saver._release(failed=True)
    dist.barrier()
    if dist.get_rank() == lost:
        for path in Path(memory).glob(f"*-{lost}of{dist.get_world_size()}.image"):
            path.unlink()
    dist.barrier()


def of_tables(values: dict[str, bytes], sharded: bool) -> dict[str, bytes]:
    """Choose the rows of sharded tables with their optimizer state, or all else."""
    return {n: v for n, v in values.items() if any(t in n for t in SHARDED) == sharded}


def differing(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    return [n for n in sorted(found.keys() | wanted.keys()) if found.get(n) != wanted.get(n)]


@contextmanager
def bytes_read(within: str = "") -> Iterator[list[int]]:
    """Count the bytes of rank files that are read meanwhile on this rank.

    Args:
        within: a folder; of files elsewhere none are counted.
    """
    counts: list[int] = []
    own = Folder.read_into

    def read_into(folder: Folder, memory: memoryview, name: str, offset: int) -> int:
        found = own(folder, memory, name, offset)
        counts.extend([found] if folder.url.startswith(within) else [])
        return found

    with mock.patch.object(Folder, "read_into", read_into):
        yield counts


def from_storage(lives: Lives) -> dict[str, bytes]:
    """Return this rank's state as another job restores it from the newest checkpoint."""
    other = Lives(str(lives.root.parent), lives.memory, spec=lives._spec, plan=lives._plan)
    other._number = 50
    other.begin(images=False)
    other.saver.restore(required=True)
    values = other.values()
    other.saver.close()
    return values
