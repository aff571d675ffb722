"""Provide the baselines of this package, stock DCP and no checkpoints, behind the same methods.

Nothing of our own format, planner or tracking is used here: ``checkpoint=dcp`` gives a user exactly
what ``dcp.save`` and ``dcp.load`` do with a TorchRec model.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Self

from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.options.arguments import PerRank, Replicated
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.root.report import CheckpointReport, RestoreReport
from torchrec_checknrun.store.retry import masked

if TYPE_CHECKING:
    from torchrec_checknrun.model.tracked_shard import RowIds

_NAME = re.compile(r"step-(\d{8,})")


class _Baseline:
    """The methods of ``Checkpointer`` for which a baseline has nothing to do.

    As a context manager it closes at the end, but waits for no rank after an error.
    """

    published = None

    def publish(self, *, wait: bool = True) -> None:
        """Publish nothing."""

    def mark(self, table: str, rows: RowIds) -> None:
        """Mark no rows: all are saved, or none."""

    def mark_all(self, table: str | None = None) -> None:
        """Mark no rows, as ``mark``."""

    def writing(self, table: str, rows: RowIds) -> AbstractContextManager[None]:
        """Let the block write rows."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()


class NoCheckpointer(_Baseline):
    """The checkpointer of ``checkpoint=off``: counts steps, saves nothing."""

    def __init__(self) -> None:
        self.steps = 0

    def restore(self, *, required: bool | None = None) -> None:
        """Restore nothing: a fresh start, whatever is required."""

    def step(self) -> CheckpointReport | None:
        """Count a step; save nothing."""
        self.steps += 1
        return None

    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Save nothing; return no report."""
        return None

    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


class _Steps:
    """The step counter, as a Stateful."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["steps"]


class DcpCheckpointer(_Baseline):
    """The checkpointer of ``checkpoint=dcp`` and ``dcp_async``: the whole model, always, in fp32.

    Args:
        root: a folder, mounted on all machines; no URL.
        asynchronous: whether to use ``dcp.async_save``: training waits only for the copy to host
            memory. Its default stager can't copy TorchRec's ShardedTensor, so the file writer
            stages.
        resume: auto, must or never, as for ``Checkpointer``.

    Raises:
        ValueError: the root is a URL, which stock DCP would take for a local folder's name, or
            empty, its name for the working directory; or ``every_steps`` is below 1.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: nn.Module,
        state: Mapping[str, Stateful | PerRank | Replicated],
        every_steps: int,
        asynchronous: bool = False,
        resume: str = "auto",
        callbacks: Sequence[Callable[[CheckpointReport], None]] = (),
    ) -> None:
        if "://" in os.fspath(root):
            raise ValueError(
                f"checkpoint=dcp saves into a folder, not to {masked(os.fspath(root))!r}: give a "
                "path that all machines mount, such as /checkpoints/run-17, or use "
                "checkpoint=check_n_run"
            )
        if not os.fspath(root):
            raise ValueError("root is empty: give the folder of the checkpoints ('.' for this one)")
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, such as 1000, not {every_steps}")
        self._root = Path(root)
        self._steps = _Steps()
        # DCP keeps one rank's content of each object, however it was declared.
        objects = {
            n: s.state if isinstance(s, (PerRank, Replicated)) else s for n, s in state.items()
        }
        self._state: dict[str, Any] = {"model": model, **objects, "_steps": self._steps}
        self._every_steps = every_steps
        self._asynchronous = asynchronous
        self._resume = resume
        self._callbacks = tuple(callbacks)
        self._ranks = Ranks(timedelta(minutes=30))
        # Background collectives and the training thread's must not share a group.
        self._background = Ranks(timedelta(minutes=30)) if asynchronous else self._ranks
        self._running: Future[Any] | None = None
        self._sequence = 0

    @property
    def steps(self) -> int:
        return self._steps.value

    def restore(self, *, required: bool | None = None) -> RestoreReport | None:
        """Load the checkpoint of the highest step that has metadata.

        Args:
            required: whether a root without a checkpoint is an error; None: as ``resume`` says.

        Raises:
            CheckpointNotFound: there is no checkpoint, and one is required.
        """
        required = self._resume == "must" if required is None else required
        started = time.perf_counter()
        fresh = self._resume == "never" and not required
        path = None if fresh else self._ranks.from_rank_0(self._newest)
        if path is None and required:
            raise CheckpointNotFound(
                f"nothing to restore: no checkpoint in {self._root}. Name the root that the "
                'checkpoints are in, or start fresh with resume="auto"'
            )
        if path is None:
            return None
        dcp.load(self._state, checkpoint_id=path, process_group=self._ranks.group)
        self._sequence = self.steps
        seconds = time.perf_counter() - started
        return RestoreReport(
            path.name, self.steps, self.steps, (path.name,), (), lossy=False, seconds=seconds
        )

    def step(self) -> CheckpointReport | None:
        """Count a step; save at every ``every_steps``-th, and report the bytes stored by then."""
        self._steps.value += 1
        return None if self.steps % self._every_steps else self._save(wait=False)

    def save(self, *, wait: bool = True) -> CheckpointReport | None:
        """Save everything.

        Args:
            wait: whether to wait until the checkpoint is durable; without ``asynchronous`` it
                always is.

        Returns:
            The report if ``wait``; None otherwise.
        """
        report = self._save(wait)
        return report if wait else None

    def _save(self, wait: bool) -> CheckpointReport:
        started = time.perf_counter()
        self.wait()
        path = self._root / f"step-{self.steps:08d}"
        if self._asynchronous:
            response = dcp.async_save(
                self._state,
                storage_writer=FileSystemWriter(path),
                process_group=self._background.group,
            )
            self._running = cast("Future[Any]", response)
        else:
            dcp.save(self._state, checkpoint_id=path, process_group=self._ranks.group)
        stall = time.perf_counter() - started
        if wait:
            self.wait()
        self._sequence += 1
        size = 0
        if self._running is None:
            files = self._ranks.from_rank_0(lambda: [f.stat().st_size for f in path.iterdir()])
            size = sum(files)
        report = CheckpointReport(
            id=path.name,
            step=self.steps,
            sequence=self._sequence,
            kind="full",
            parent=None,
            modified_rows=0,
            total_rows=0,
            modified_fraction=1.0,
            table_fractions={},
            bytes={"other": size},
            full_fp32_bytes=size,
            modified_bytes=size,
            encoded_bytes=size,
            stall_seconds=stall,
            encoded_seconds=stall,
            written_seconds=stall,
            committed_seconds=stall,
            in_parts=False,
            lossy_restores=0,
            chain_length=1,
            error_mean=None,
            error_max=None,
        )
        for callback in self._callbacks:
            callback(report)
        return report

    def wait(self) -> None:
        """Wait until a background save is durable; raise its error."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        """Wait for a background save."""
        self.wait()

    def _newest(self) -> Path | None:
        if not self._root.is_dir():
            return None
        found = [
            (int(name[1]), path)
            for path in self._root.iterdir()
            if (name := _NAME.fullmatch(path.name)) and (path / ".metadata").is_file()
        ]
        return max(found)[1] if found else None
