"""One local shard of a tracked table: its marks, and its rows in and out by global ids."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.model.marks import Consumer, Marks
from torchrec_checknrun.model.resharding import Place
from torchrec_checknrun.shards import LocalShard, Rectangle, Rows

RowIds = torch.Tensor | np.ndarray | Sequence[int]


class TrackedShard:
    """One local shard with its marks; all row ids that go in or out are global.

    Args:
        kernel: holds it.
        index: which of the kernel's shards it is.
        writes: notices what is written to the kernel's tables by hand.
    """

    _alive: ClassVar[weakref.WeakSet[TrackedShard]] = weakref.WeakSet()

    def __init__(self, kernel: Kernel, index: int, marks: Marks, writes: WriteWatch) -> None:
        self.local: LocalShard = kernel.shards[index]
        self.marks = marks
        self._kernel = kernel
        self._index = index
        self._writes = writes
        self._alive.add(self)

    @property
    def table(self) -> str:
        """The table's state-dict name without ``.weight``."""
        return self.local.table

    @property
    def rectangle(self) -> Rectangle:
        """Which rows and columns of the table are here."""
        return self.local.rectangle

    @property
    def kernel_module(self) -> object:
        """The TorchRec kernel module that holds the shard, with others perhaps."""
        return self._kernel.module

    @property
    def place(self) -> Place:
        """Table and rectangle."""
        return self.table, self.rectangle

    def mark(self, rows: RowIds) -> None:
        """Marks those of ``rows`` that are here; others are another rank's business."""
        ids = as_ids(rows) - self.rectangle.row_start
        self.marks.mark(ids[(ids >= 0) & (ids < self.rectangle.rows)].to(self.marks.raw.device))

    def mark_all(self) -> None:
        """Marks every row of the shard."""
        self.marks.mark_all()

    def modified_rows(self, consumer: Consumer = Consumer.USER) -> torch.Tensor:
        """Sorted global ids ``(n,)`` int64 (CPU) of rows modified since ``clear(consumer)``."""
        self._writes.check()
        mask = self.marks.modified(consumer).cpu().numpy()
        return torch.from_numpy(np.flatnonzero(mask)) + self.rectangle.row_start

    def read_rows(self, rows: RowIds) -> Rows:
        """Copies of weight and optimizer rows.

        Raises:
            IndexError: a row is not in this shard.
        """
        self._writes.flush()
        return self.local.gather(as_ids(rows))

    def encode_rows(self, rows: RowIds, bits: int = 8) -> torch.Tensor:
        """The rows' weights in FBGEMM's fused rowwise layout, ``(n, row_bytes)`` uint8.

        Args:
            rows: global ids in this shard.
            bits: 8, 4 or 2.

        Raises:
            IndexError: a row is not in this shard.
            ValueError: other ``bits``, or a row holds a value that the layout can't hold (NaN,
                infinity, or beyond fp16 or too small for it at 4 and 2 bit).
        """
        if bits not in (8, 4, 2):
            raise ValueError(f"bits must be 8, 4 or 2, FBGEMM's widths, not {bits!r}")
        self._writes.flush()
        ids = self.local.local_ids(as_ids(rows))
        encoded = Rowwise(bits, "asymmetric").encode(self.local.weight, ids)
        if len(encoded.exceptions) or encoded.parameters:
            raise ValueError(
                f"{self.local}: a row holds a value that {bits}-bit rows can't hold (NaN, "
                "infinity, too large or too small): find it with read_rows, or read the rows "
                "unencoded"
            )
        return encoded.data

    def write_rows(
        self,
        rows: RowIds,
        weight: torch.Tensor,
        optimizer: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Overwrites rows in place; they count as modified for every consumer, of all who track
        the model.

        Args:
            rows: global ids in this shard, ``(n,)``.
            weight: ``(n, cols)``.
            optimizer: states by name as ``read_rows`` gives them; those left out stay.

        Raises:
            IndexError: a row is not in this shard.
            ValueError: a shape doesn't fit, or a state has an unknown name.
        """
        ids = as_ids(rows)
        states = dict(optimizer or {})
        expected = {"weight": (len(ids), self.rectangle.cols)}
        for name, state in self.local.optimizer.items():
            expected[name] = (len(ids), *state.shape[1:])
        for name, tensor in {"weight": weight, **states}.items():
            if name not in expected or tuple(tensor.shape) != expected[name]:
                raise ValueError(
                    f"{self.local}: {name} of shape {tuple(tensor.shape)} doesn't fit; expected "
                    f"{expected}"
                )
        self._writes.flush()
        self.local.local_ids(ids)  # if one isn't here, nothing is marked
        with announced([self._kernel.module]):
            for shard in self.everywhere():
                shard.mark(ids)  # first: whatever happens, no row is written unmarked
            self.local.scatter(Rows(ids, weight, states))
        self._kernel.purge()

    def everywhere(self) -> Iterator[TrackedShard]:
        """This shard as everyone has it who tracks its kernel; the first is this one."""
        yield self
        for shard in list(self._alive):
            if shard._kernel.module is self._kernel.module and shard._index == self._index:
                yield shard


def as_ids(rows: RowIds) -> torch.Tensor:
    """Return row ids as a vector ``(n,)`` int64, where they are.

    Raises:
        TypeError: they are no integers.
    """
    device = rows.device if isinstance(rows, torch.Tensor) else "cpu"
    ids = torch.as_tensor(rows, device=device).reshape(-1)
    if len(ids) and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
        raise TypeError(f"expected integer row ids, not {ids.dtype}; of a mask, pass its nonzero()")
    return ids.to(torch.int64)
