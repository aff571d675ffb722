"""Writes to tables by anybody but training and this package: their rows must count as modified.

FBGEMM updates rows without telling PyTorch: the version counter of the memory stands still while a
fused kernel trains. Whatever writes through a parameter, a view or a state dict (``copy_``,
``weight[rows] = …``, ``load_state_dict``) moves the counter. One counter serves all tables of a
kernel, so that all their rows are marked: a superset is always right.

No counter sees writes through ``.data``, NumPy, a collective on the table itself or a kernel of the
user's own: such rows must be named with ``mark``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.model.stepped_tables import SteppedTables

if TYPE_CHECKING:
    from torchrec_checknrun.model.marks import Marks

logger = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """A tensor of a kernel's memory, as it was last looked at."""

    address: int
    version: int
    tensor: weakref.ref[torch.Tensor] | None
    """Of a dense optimizer's state, which may be replaced by other memory at the same address."""


class WriteWatch:
    """Notices writes to the memory of one kernel's tables that were not announced.

    Args:
        kernel: holds the tables.
        marks: of its local shards, in the kernel's order.

    Attributes:
        warns: whether to log the first write; before any marks were taken or cleared, whatever is
            saved first holds all rows anyway.
    """

    _alive: ClassVar[weakref.WeakSet[WriteWatch]] = weakref.WeakSet()

    def __init__(self, kernel: Kernel, marks: Sequence[Marks]) -> None:
        self.kernel = kernel
        self._marks = marks
        self.stepped = SteppedTables(kernel)
        self._seen = self._look()
        self._announced = 0
        self._warned = False
        self.warns = False
        self._alive.add(self)

    @classmethod
    def of(cls, modules: Iterable[Any]) -> list[WriteWatch]:
        """Return the watches on these kernels, of all who track them.

        Args:
            modules: TorchRec's kernel modules, or FBGEMM's inside them.
        """
        wanted = {id(module) for module in modules}
        return [
            watch
            for watch in cls._alive
            if not wanted.isdisjoint((id(watch.kernel.module), id(watch.kernel.module._emb_module)))
        ]

    def check(self) -> None:
        """Mark all rows, for every consumer, if anything was written since the last look."""
        if self._announced:
            return
        now = self._look()
        if now == self._seen:
            return
        self._seen = now
        known = all(bool((marks.raw == 255).all()) for marks in self._marks)
        for marks in self._marks:
            marks.mark_all()
        if self.warns and not known and not self._warned:
            self._warned = True
            logger.warning(
                "weights or optimizer rows of %s were written outside of training (load_state_dict,"
                " copy_, an assignment …): all rows of these tables count as modified, since it is "
                "unknown which were written. To save only those, write them inside "
                "`with checkpointer.writing(table, rows):` or with write_rows",
                sorted({shard.table for shard in self.kernel.shards}),
            )

    def acknowledge(self) -> None:
        """Take the memory as it is now for known: its modified rows are marked."""
        if not self._announced:
            self._seen = self._look()

    def flush(self) -> None:
        """Bring rows back from the GPU cache to memory, which may write there."""
        with announced([self.kernel.module]):
            self.kernel.flush()

    def _look(self) -> list[_Seen]:
        if self.kernel.data_parallel:
            first = self.stepped.weights()[:1]  # all are views of one memory, with one counter
            seen = [_Seen(tensor.data_ptr(), _version(tensor), None) for tensor in first]
            for tensor in self._dense_states():
                seen.append(_Seen(tensor.data_ptr(), _version(tensor), weakref.ref(tensor)))
            return seen
        weights, states = self.kernel.memory()
        return [_Seen(tensor.data_ptr(), _version(tensor), None) for tensor in (*weights, *states)]

    def _dense_states(self) -> Iterator[torch.Tensor]:
        """Find data-parallel tables' rows of optimizer state; every step of theirs asks."""
        for optimizer in self.kernel.optimizers:
            for stepped in self.stepped.of(optimizer):
                rows = stepped.parameter.size(0)
                for state in optimizer.state.get(stepped.parameter, {}).values():
                    if isinstance(state, torch.Tensor) and state.dim() and state.size(0) == rows:
                        yield state


@contextmanager
def announced(modules: Iterable[Any]) -> Iterator[None]:
    """Let writes to some kernels' memory pass: whoever writes has marked the rows for all.

    If an exception leaves the block, all rows are marked at the next look.
    """
    watches = WriteWatch.of(modules)
    for watch in watches:
        watch.check()
        watch._announced += 1
    try:
        yield
    except BaseException:
        for watch in watches:
            watch._announced -= 1
        raise
    for watch in watches:
        watch._announced -= 1
        watch.acknowledge()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
