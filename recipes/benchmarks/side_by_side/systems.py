"""Define the compared systems, each behind the same few methods.

A system's ``save`` returns when training may continue. The store alone decides what is durable: a
checkpoint is there when its folder holds one of ``store.MARKERS``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from recipes.benchmarks.side_by_side.model import Job
from recipes.benchmarks.side_by_side.store import committed
from recipes.benchmarks.side_by_side.synced import synced_snapshot
from torchrec_checknrun import Checkpointer, Consecutive, Full, Intermittent, Quantization
from torchrec_checknrun.policy import Policy
from torchrec_checknrun.tracking import track

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "full": Full,
    "consecutive": Consecutive,
    "intermittent": Intermittent,
}


class NotInstalled(Exception):
    """The peer is not installed in this environment."""


class System:
    """A system without checkpoints, the base class of the others.

    Args:
        job: the model in training.
        root: the folder of this run's checkpoints.
    """

    def __init__(self, job: Job, root: Path) -> None:
        self.job = job
        self.root = root
        self.saves = 0
        self.reports: list[dict[str, Any]] = []
        """A system's reports of its own checkpoints."""

    @property
    def busy(self) -> bool:
        """Return whether a save is in progress."""
        return False

    def save(self) -> None:
        """Begin a checkpoint; return when training may continue."""

    def step(self) -> None:
        """Tell the system that a training step has ended."""

    def mark(self, table: str, rows: torch.Tensor) -> None:
        """Tell the system, in place of training, that rows (global ids) have changed."""

    def writing(self, table: str, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Announce that rows (global ids) are overwritten by other means than training."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until the last save is durable."""

    def restore(self) -> None:
        """Restore the newest checkpoint."""
        raise NotImplementedError("without checkpoints there is nothing to restore")

    def close(self) -> None:
        """Close the system at the end."""

    def _next(self) -> Path:
        self.saves += 1
        return self.root / f"{self.saves:03d}"

    def _newest(self) -> Path:
        return committed(self.root)[-1]


class Dcp(System):
    """The system that saves everything by ``dcp.save``."""

    def save(self) -> None:
        dcp.save(self.job.state, checkpoint_id=self._next())

    def restore(self) -> None:
        dcp.load(self.job.state, checkpoint_id=self._newest())


class DcpAsync(Dcp):
    """The system that saves everything by ``dcp.async_save``.

    Args:
        staging: ``writer``: by the file writer, the only one that copies TorchRec's ShardedTensor;
            the others copy DTensors: ``default``: by a new stager for every save, as DCP does;
            ``kept``: by a stager that is kept with its memory; ``shared``: in shared memory.
        process: whether another process writes.
    """

    def __init__(
        self,
        job: Job,
        root: Path,
        staging: Literal["writer", "default", "kept", "shared"],
        process: bool = False,
    ) -> None:
        super().__init__(job, root)
        # Background collectives and the training thread's must not share a group.
        self._group = None if process else dist.new_group(backend="gloo")
        self._staging = staging
        self._stager: DefaultStager | None = None
        if staging in ("kept", "shared"):
            # Pinned memory, side streams and non-blocking copies are for GPUs.
            cuda = torch.cuda.is_available()
            options = StagingOptions(cuda, staging == "shared", False, cuda)
            self._stager = DefaultStager(options)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._running: Any = None

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def save(self) -> None:
        path = self._next()
        self._running = dcp.async_save(
            self.job.state,
            checkpoint_id=path,
            storage_writer=FileSystemWriter(path) if self._staging == "writer" else None,
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
            process_group=self._group,
        )

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()


class _Together:
    """Model and optimizer as one object: torchsnapshot can't restore two with ShardedTensors."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._job.state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._job.state.items():
            part.load_state_dict(state[name])


class TorchSnapshot(System):
    """The system that saves everything by torchsnapshot's ``take`` or ``async_take``; the files are
    synced before the commit (`synced` explains why).
    """

    def __init__(self, job: Job, root: Path, asynchronous: bool = False) -> None:
        if importlib.util.find_spec("torchsnapshot") is None:
            raise NotInstalled("not installed: pip install torchsnapshot==0.1.0 (the extra peers)")
        super().__init__(job, root)
        self._snapshot = synced_snapshot()
        self._take = self._snapshot.async_take if asynchronous else self._snapshot.take
        self._group = dist.new_group(backend="gloo")
        self._state = {"job": _Together(job)}
        self._running: Any = None

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def save(self) -> None:
        found = self._take(str(self._next()), self._state, self._group)
        self._running = found if hasattr(found, "done") else None

    def wait(self) -> None:
        if self._running is not None:
            self._running.wait()

    def restore(self) -> None:
        self._snapshot(str(self._newest()), self._group).restore(self._state)


class TorchSave(System):
    """The system that saves changed rows, as tracked by this package, by ``torch.save``."""

    def __init__(self, job: Job, root: Path) -> None:
        super().__init__(job, root)
        self._tracked = track(job.model)
        self._tracked.mark_all()

    def mark(self, table: str, rows: torch.Tensor) -> None:
        self._tracked.mark(table, rows)

    def save(self) -> None:
        path = self._next()
        path.mkdir(parents=True, exist_ok=True)
        rows, optimizer = {}, {}
        for shard in self._tracked.shards:
            found = shard.read_rows(shard.modified_rows())
            rows[shard.table] = (found.ids, found.weight)
            optimizer[shard.table] = found.optimizer
        self._tracked.clear()
        _write(rows, path / f"tables-{self.job.rank}.pt")
        _write(optimizer, path / f"optimizer-{self.job.rank}.pt")
        dist.barrier()
        if self.job.rank == 0:
            tables = set(rows).union(self._tracked.tables)
            state = {
                name: value
                for name, value in self.job.model.state_dict().items()
                if name.removesuffix(".weight") not in tables
            }
            dense = self.job.optimizer.optimizers[1][1].state_dict()
            _write({"model": state, "optimizer": dense}, path / "dense.pt")

    def restore(self) -> None:
        shards = {shard.table: shard for shard in self._tracked.shards}
        for path in sorted(self.root.iterdir()):
            rows = torch.load(path / f"tables-{self.job.rank}.pt")
            optimizer = torch.load(path / f"optimizer-{self.job.rank}.pt")
            for table, (ids, weight) in rows.items():
                shards[table].write_rows(ids, weight, optimizer[table])
        dense = torch.load(path / "dense.pt")
        self.job.model.load_state_dict(dense["model"], strict=False)
        self.job.optimizer.optimizers[1][1].load_state_dict(dense["optimizer"])

    def close(self) -> None:
        self._tracked.close()


def _write(content: object, path: Path) -> None:
    with path.with_suffix(".tmp").open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").rename(path)


class Ours(System):
    """The system that saves by this package.

    Args:
        bits: None is exact.
        method: of rows that are not of so many bits.
        optimizer: scheme of row-wise optimizer state.
        waiting: whether ``save`` returns when the checkpoint is durable.
        others: other options of ``Checkpointer``.
    """

    def __init__(
        self,
        job: Job,
        root: Path,
        *,
        bits: int | None = None,
        method: str | None = None,
        policy: str,
        optimizer: str = "fp32",
        waiting: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(job, root)
        chosen = {"bits": bits} if method is None else {"method": method}
        self.checkpointer = Checkpointer(
            root,
            model=job.model,
            retention=None,
            state={"optimizer": job.optimizer},
            policy=POLICIES[policy](),
            quantization=Quantization(**chosen, optimizer=optimizer),
            callbacks=[lambda report: self.reports.append(report.to_json())],
            **others,
        )
        self._waiting = waiting

    @property
    def busy(self) -> bool:
        return len(self.reports) < self.saves

    def save(self) -> None:
        self.saves += 1
        self.checkpointer.save(wait=self._waiting)

    def step(self) -> None:
        self.checkpointer.step()

    def mark(self, table: str, rows: torch.Tensor) -> None:
        self.checkpointer.mark(table, rows)

    def writing(self, table: str, rows: torch.Tensor) -> AbstractContextManager[None]:
        return self.checkpointer.writing(table, rows)

    def wait(self) -> None:
        self.checkpointer.wait()

    def restore(self) -> None:
        if self.checkpointer.restore() is None:
            raise FileNotFoundError(f"no checkpoint in {self.root}")

    def close(self) -> None:
        self.checkpointer.close()


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: of the row in the table.
        system, options: class and arguments of the system.
        dtensor: whether the model's state dict is to have DTensors.
    """

    name: str
    system: type[System]
    options: dict[str, Any] = field(default_factory=dict)
    dtensor: bool = False

    def make(self, job: Job, root: Path) -> System:
        """Make a system, ready for its first save.

        Raises:
            NotInstalled: the system's package is missing.
        """
        return self.system(job, root, **self.options)


NONE, DCP, CHANGED_ROWS = "no checkpoint", "dcp.save", "torch.save of changed rows"
ASYNC = "dcp.async_save"
SNAPSHOT, SNAPSHOT_ASYNC = "torchsnapshot take", "torchsnapshot async_take"


def ours(
    bits: int | None, policy: str, background: str = "thread", staging: str = "copy_on_write"
) -> Case:
    """Return a row of this package."""
    width = "fp32" if bits is None else f"{bits} bit"
    name = f"ours {width} {policy}, {background}, {staging.replace('_', ' ')}"
    options = {"bits": bits, "policy": policy, "background": background, "staging": staging}
    return Case(name, Ours, options)


PEERS = [
    Case(NONE, System),
    Case(DCP, Dcp),
    Case(f"{ASYNC}, plain", DcpAsync, {"staging": "writer"}),
    Case(f"{ASYNC}, DTensor", DcpAsync, {"staging": "default"}, dtensor=True),
    Case(f"{ASYNC}, DTensor, kept stager", DcpAsync, {"staging": "kept"}, dtensor=True),
    Case(f"{ASYNC}, DTensor, shared stager", DcpAsync, {"staging": "shared"}, dtensor=True),
    Case(
        f"{ASYNC}, DTensor, shared stager, process",
        DcpAsync,
        {"staging": "shared", "process": True},
        dtensor=True,
    ),
    Case(SNAPSHOT, TorchSnapshot),
    Case(SNAPSHOT_ASYNC, TorchSnapshot, {"asynchronous": True}),
    Case(CHANGED_ROWS, TorchSave),
]
OURS = [
    *(ours(bits, "consecutive") for bits in (None, 8, 4, 2)),
    ours(None, "full"),
    ours(4, "full"),
    ours(4, "intermittent"),
    ours(4, "consecutive", staging="copy"),
    ours(4, "consecutive", staging="encode"),
    ours(8, "consecutive", staging="encode"),
    ours(4, "consecutive", background="process"),
    ours(4, "consecutive", background="process", staging="encode"),
    ours(4, "consecutive", staging="auto"),
]
ON_WRITE = ours(4, "consecutive").name
COPY = ours(4, "consecutive", staging="copy").name
PROCESS = ours(4, "consecutive", background="process").name
CASES = {case.name: case for case in [*PEERS, *OURS]}
