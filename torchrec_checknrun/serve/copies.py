"""Let predictions see one version at a time: two copies of a model, or one and a pause.

With two, rows are written into the copy that nobody reads; then one pointer is swapped. Who began
on the other copy stays on it. Once the last of them has left, the same rows are copied there, in
memory. The rows in which the idle copy may differ are known at any time, so that an attempt that
fails half-way is undone by the same copy.

With one, for models too large to be held twice, rows are staged in their final form, beyond a
budget in a file, and copied in while predictions wait.

On GPUs kernels run after the threads that launched them have gone on: a copy is written to once all
kernels of predictions that left it have run, and shown once all writes have.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from torchrec_checknrun.restore.state_fit import write_values
from torchrec_checknrun.row_sets import DoneRows
from torchrec_checknrun.serve.inference.replica import Replica
from torchrec_checknrun.serve.version import Version
from torchrec_checknrun.tools.scratch import file_tensor

_BLOCK_BYTES = 1 << 20
"""Bytes of a table that are looked at at a time: copied in less than a millisecond."""
_FIRST_FILE, _MOST_FILE = 1 << 20, 1 << 30
"""Bytes of the first file of staged rows, and of the largest: each has twice those of the last."""
_SLICE_SECONDS = 0.5
"""The longest wait between two looks whether the follower is being closed."""


class ReadersStay(Exception):
    """Predictions that began on an earlier version and don't end."""


class Target(Protocol):
    """The tables and dense tensors that a version is written to before anyone sees it."""

    def put(self, table: str, ids: np.ndarray, rows: torch.Tensor) -> None:
        """Write rows of a table of the model, ``(n, stride)`` uint8; see ``ServedTable.put``."""

    def put_dense(self, name: str, value: torch.Tensor) -> None:
        """Write a dense tensor of the model."""


class Copies(Protocol):
    """A model that is read while its next version is written."""

    replica: Replica
    """Any of the model's copies: all have the same names and forms."""

    def read(self) -> Iterator[tuple[nn.Module, Version | None]]:
        """See ``Follower.read``; a generator for ``contextmanager``."""

    def begin(
        self, closing: Callable[[], bool], seconds: float, rest: Callable[[], object]
    ) -> Target:
        """Return where to write the next version.

        Args:
            closing: tells whether to give up.
            seconds: the longest wait for predictions on an earlier version.
            rest: called between blocks of rows, while no prediction waits.

        Raises:
            ReadersStay: predictions on an earlier version don't end.
        """

    def show(self, version: Version, closing: Callable[[], bool], seconds: float) -> None:
        """Let the predictions that begin from now on see what was written.

        Raises:
            ReadersStay: as in ``begin``; nothing was shown.
        """

    def settle(self, rest: Callable[[], object]) -> None:
        """Prepare for the next version, unless predictions on an earlier one still run.

        Args:
            rest: as in ``begin``.
        """

    @property
    def version(self) -> Version | None:
        """Return the version that predictions see that begin now."""


class _Side:
    """One of two copies.

    Attributes:
        readers: predictions that began on it and have not ended.
        behind: by table, the rows that may differ from the other copy's.
        behind_dense: likewise, names of dense tensors.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.version: Version | None = None
        self.readers = 0
        self.behind: dict[str, DoneRows] = {}
        self.behind_dense: set[str] = set()

    def put(self, table: str, ids: np.ndarray, rows: torch.Tensor) -> None:
        target = self.replica.tables[table]
        if table not in self.behind:
            self.behind[table] = DoneRows(target.rows)
        own = ids if not len(ids) or ids[-1] < target.rows else ids[ids < target.rows]
        self.behind[table].add(np.ascontiguousarray(own))  # before the first byte changes
        target.put(ids, rows)

    def put_dense(self, name: str, value: torch.Tensor) -> None:
        self.behind_dense.add(name)
        write_values(value, self.replica.dense[name])

    def catch_up(self, other: _Side, rest: Callable[[], object]) -> None:
        """Copy the rows that may differ from the other side."""
        for table, rows in self.behind.items():
            into, source = self.replica.tables[table], other.replica.tables[table]
            size = max(1, _BLOCK_BYTES // into.form.stride)
            for start in range(0, rows.rows, size):
                ids = rows.positions(start, min(rows.rows, start + size))
                if len(ids):
                    into.copy_from(source, ids)
                rest()
        for name in self.behind_dense:
            write_values(other.replica.dense[name], self.replica.dense[name])
        if self.behind_dense:
            self.replica.load_again()
        self.behind, self.behind_dense = {}, set()


class TwoCopies:
    """Two copies of a model, of which one is served and the other written; see the module."""

    def __init__(self, model: nn.Module) -> None:
        self.replica = Replica(model)
        self._served, self._idle = _Side(self.replica), _Side(self.replica.another())
        self.replica.finish()  # the copy: another thread will write to it
        # Held for a few instructions: never while a prediction runs or a row is written.
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    @property
    def version(self) -> Version | None:
        return self._served.version

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Return both copies."""
        return self._served.replica, self._idle.replica

    @contextmanager
    def read(self) -> Iterator[tuple[nn.Module, Version | None]]:
        with self._lock:
            side = self._served
            side.readers += 1
        try:
            yield side.replica.model, side.version
        finally:
            with self._lock:
                side.readers -= 1
                if not side.readers:
                    self._left.notify_all()

    def begin(
        self, closing: Callable[[], bool], seconds: float, rest: Callable[[], object]
    ) -> Target:
        idle = self._idle
        with self._left:
            _wait(self._left, lambda: not idle.readers, closing, seconds, idle.version)
        self.settle(rest)
        return idle

    def show(self, version: Version, closing: Callable[[], bool], seconds: float) -> None:
        before, after = self._served, self._idle
        after.replica.load_again()
        after.replica.finish()
        after.version = version
        before.behind, before.behind_dense = after.behind, after.behind_dense
        after.behind, after.behind_dense = {}, set()
        with self._lock:
            self._served, self._idle = after, before

    def settle(self, rest: Callable[[], object]) -> None:
        with self._lock:
            if self._idle.readers:  # then before the next version
                return
        self._idle.replica.finish()
        self._idle.catch_up(self._served, rest)  # nobody enters it until it is swapped


class _Staged:
    """Rows and dense tensors on their way into a model.

    Args:
        most: bytes to keep in memory; further ones go to a file.
    """

    def __init__(self, replica: Replica, most: int) -> None:
        self._replica = replica
        self._room = most
        self._rows: list[tuple[str, np.ndarray, torch.Tensor]] = []
        self._dense: dict[str, torch.Tensor] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the last file

    def put(self, table: str, ids: np.ndarray, rows: torch.Tensor) -> None:
        size = rows.numel() + ids.nbytes
        if size <= self._room:
            self._room -= size
            self._rows.append((table, ids.copy(), rows.clone()))
        elif len(ids):
            self._rows.append(
                (table, self._filed(torch.from_numpy(ids)).numpy(), self._filed(rows))
            )

    def put_dense(self, name: str, value: torch.Tensor) -> None:
        self._dense[name] = value.detach().clone()

    def _filed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to a file, where others follow: a process can map only so many files."""
        size = tensor.nbytes
        if size > len(self._left):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="checknrun-")
            room = max(size, min(_FIRST_FILE << self._files, _MOST_FILE))
            path = Path(self._folder.name, str(self._files))
            self._left = file_tensor(path, (room,), torch.uint8)
            self._files += 1
        place, self._left = self._left[:size], self._left[-(-size // 8) * 8 :]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def apply(self) -> None:
        """Copy everything into the model."""
        for table, ids, rows in self._rows:
            self._replica.tables[table].put(ids, rows)
        for name, value in self._dense.items():
            write_values(value, self._replica.dense[name])
        self._replica.load_again()

    def close(self) -> None:
        """Drop what is staged."""
        self._rows.clear()
        self._left = self._left[:0].clone()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def mode_of(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context to copy a model in and write to it: ``torch.inference_mode()`` if it was
    made there, since it can't be written to elsewhere; else outside of it, for the same reason.
    """
    held = (*model.parameters(), *model.buffers())
    return torch.inference_mode(any(tensor.is_inference() for tensor in held))


class OneCopy:
    """A model that is held once: predictions wait while a version is copied in.

    Args:
        staging_bytes: of rows to stage in memory; further ones go to a file.
    """

    def __init__(self, model: nn.Module, staging_bytes: int) -> None:
        self.replica = Replica(model)
        self.version: Version | None = None
        self._most = staging_bytes
        self._staged: _Staged | None = None
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._own = threading.local()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Return the one copy."""
        return (self.replica,)

    @contextmanager
    def read(self) -> Iterator[tuple[nn.Module, Version | None]]:
        inside = getattr(self._own, "inside", 0)
        with self._changed:
            while self._writing and not inside:  # who is inside already would wait for itself
                self._changed.wait()
            self._readers += 1
            version = self.version
        self._own.inside = inside + 1
        try:
            yield self.replica.model, version
        finally:
            self._own.inside -= 1
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def begin(
        self, closing: Callable[[], bool], seconds: float, rest: Callable[[], object]
    ) -> Target:
        if self._staged is not None:
            self._staged.close()
        self._staged = _Staged(self.replica, self._most)
        return self._staged

    def show(self, version: Version, closing: Callable[[], bool], seconds: float) -> None:
        assert self._staged is not None
        with self._changed:
            self._writing = True
            try:
                _wait(self._changed, lambda: not self._readers, closing, seconds, self.version)
                self.replica.finish()
                self._staged.apply()
                self.replica.finish()
                self.version = version
            finally:
                self._writing = False
                self._changed.notify_all()
        self._staged.close()
        self._staged = None

    def settle(self, rest: Callable[[], object]) -> None:
        """Do nothing: nothing is left to do."""


def _wait(
    condition: threading.Condition,
    met: Callable[[], bool],
    closing: Callable[[], bool],
    seconds: float,
    version: Version | None,
) -> None:
    """Wait for readers to leave.

    Raises:
        ReadersStay: they don't, or the follower is closed.
    """
    began = time.monotonic()
    while not met():
        waited = time.monotonic() - began  # whoever else leaves ends a pause early
        if closing() or waited >= seconds:
            which = "the first model" if version is None else version.checkpoint_id
            raise ReadersStay(
                f"a prediction on {which} has not ended after {waited:.0f} s: leave "
                "`with follower.read()` after each prediction"
            )
        condition.wait(min(_SLICE_SECONDS, seconds - waited))
