"""Let several runs live in one process, each taken for a process of its own; end or kill them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.run import going_on
from torchrec_checknrun.run.compaction import Copied
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import Manifest
from torchrec_checknrun.writers.claims import Holder
from torchrec_checknrun.writers.lease import Lease

TABLES = (TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 25, 4, ("f1", "f0")))
SPEC = ModelSpec((CollectionSpec("c", TABLES),))
PLANS = ("table_wise", "row_wise")


class Compaction:
    """A compaction behind training that ends before the next save, in this process."""

    compact: Any = None

    def __init__(self, root: Folder, original: Manifest) -> None:
        self.outcome: Copied | None = Compaction.compact(root, original)

    def wait(self, seconds: float | None = None) -> Copied | None:
        return self.outcome

    def end(self) -> None:
        pass


@dataclass
class Life:
    """A run, with the name of the process that it pretends to be."""

    name: str
    job: Job
    saver: Checkpointer
    lossy: bool

    @property
    def writer(self) -> RootWriter:
        return self.saver._saver.proposer._writer

    @property
    def lineage(self) -> Lineage:
        return self.saver._saver.proposer._lineage


@dataclass
class Processes:
    """The processes that runs pretend to be; those of ``dead`` are known to have ended."""

    now: str = "tool"
    dead: set[str] = field(default_factory=set)
    count: int = 0

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Be another process during a block."""
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before

    def start(self, root: Path, seed: int, lossy: bool, **options: Any) -> Life:
        """Start a run with a model of its own, trained on data of its own."""
        self.count += 1
        name = f"run {self.count}"
        job = Job.build(SPEC, uniform_plan(SPEC, PLANS[seed % 2], 1), seed=seed)
        job.data_seed = seed
        with self.acting(name):
            saver = Checkpointer(
                root,
                model=job.model,
                state={"optimizer": job.optimizer, "job": job},
                chunk_bytes=1000,
                **options,
            )
        return Life(name, job, saver, lossy)

    def end(self, life: Life) -> None:
        """End a run as it should."""
        with self.acting(life.name):
            life.saver.close()
        self.dead.add(life.name)

    def kill(self, life: Life) -> None:
        """End a run without giving its claim up."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Lease, "release", _stop)
            life.writer.wait_for_pruning()
            life.saver._release(failed=True)
        self.dead.add(life.name)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let each run seem to be a process of its own."""
        real = Holder.this_process()

        def seems_dead(holder: Holder) -> bool:
            return holder.run in self.dead

        def seems_alive(holder: Holder) -> bool:
            return holder.run not in self.dead

        here = classmethod(lambda cls: replace(real, run=self.now))
        patch.setattr(Holder, "this_process", here)
        patch.setattr(Holder, "gone", property(seems_dead))
        patch.setattr(Holder, "alive_here", property(seems_alive))
        patch.setattr(going_on, "CompactionProcess", Compaction)


def _stop(lease: Lease, forget: bool = False) -> None:
    lease._stop.set()
    if lease in Lease._held:
        Lease._held.remove(lease)
