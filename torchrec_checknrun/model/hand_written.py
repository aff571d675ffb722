"""Notice writes to tables outside of training and this package, and count the rows as modified.

FBGEMM updates rows without telling PyTorch: the version counter of the memory stands still while a
fused kernel trains. A write through a parameter, a view or a state dict (``copy_``,
``weight[rows] = …``, ``load_state_dict``) moves the counter. One counter serves all tables of a
kernel, so all their rows are marked: a superset is always safe.

No counter moves with writes through ``.data``, NumPy, a collective on the table itself or a user's
own kernel: name such rows with ``mark``. Of the others a sample of rows tells some, at a cut.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, Protocol

import torch

from torchrec_checknrun.dense.tree import state_at
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.gpu_streams import GpuReads, KernelStreams
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.marks.row_copies import KernelCopies
from torchrec_checknrun.model.kernels import Kernel
from torchrec_checknrun.model.stepped_tables import SteppedByHand, SteppedTables
from torchrec_checknrun.ranks import listed

logger = logging.getLogger(__name__)


class Lookup:
    """A lookup that a backward pass may follow; lives as long as that is possible.

    Attributes:
        changes: how often the journal had heard of changed rows by then.
    """

    changes = 0


class Journal(Protocol):
    """A kernel's rows as they are before each change, so that a step can be undone."""

    def looked_up(self, lookup: Lookup) -> None:
        """Hear of a lookup whose rows a backward pass may change."""

    def goes_back(self, lookup: Lookup) -> None:
        """Hear that the backward pass has come to a lookup."""

    def before_update(
        self, values: torch.Tensor, offsets: list[int], feature_to_shard: list[int]
    ) -> None:
        """Keep the rows of a backward pass; arguments as of ``KernelCopies.before_update``."""

    def before_write(self, place: int, ids: torch.Tensor) -> None:
        """Keep rows of one shard; arguments as of ``KernelCopies.before_write``."""

    def before_any(self) -> None:
        """Keep all rows of the kernel, which may change."""

    def missed(self, why: str) -> None:
        """Hear that rows were or will be changed that could not be kept."""

    def written(self) -> None:
        """Hear that the program has written rows, unannounced, since the last look."""


class Overwritten(SaveFailed):
    """Memory was written while it was being saved, by other means than an optimizer's step."""


class RowsOverwritten(Overwritten):
    """Rows of tables were written by hand while they were being saved."""


class _Seen(NamedTuple):
    """A tensor of a kernel's memory, as last seen."""

    address: int
    version: int
    tensor: weakref.ref[torch.Tensor] | None
    """Set for a dense optimizer's state, which other memory may replace at the same address."""


_Look = list[_Seen] | tuple[list[int], list[int]]
"""The result of a look at a kernel's memory; of a fused kernel's, addresses and versions."""


_EARLY_UPDATES = 8
"""The first updates, between which is looked whether the program writes rows by hand."""
_OFTEN = 3
"""Such looks with a write: no accident, even where two micro-batches make a step."""


class WriteWatch:
    """A watch on the memory of one kernel's tables that notices writes not announced.

    Args:
        kernel: holds the tables.
        marks: of the kernel's local shards, in the kernel's order.

    Attributes:
        kernel, marks: as given.
        stepped: finds the tables that dense optimizers step.
        by_hand: notices the tables that the program steps without an optimizer.
        copies: the rows of a checkpoint in progress that must be copied before they change; None
            without one. The background ends them at any moment: look once.
        late: makes copies of the tables as a whole for a checkpoint in progress, before a change.
        journal: keeps rows before they change, in case the process dies; None without images.
        read: recorded on a GPU once the rows of a checkpoint are copied out of it.
        streams: the streams on which the kernel works; None on a CPU.
        reads: copies rows out of a GPU for a checkpoint in progress; as ``copies``, look once.
        spoils: whether such a write has come while rows were being copied, or several between the
            first updates: rows are to be copied at the cut.
        updates_to_look_at: updates that ``look_early`` is still to be called before.
        warns: whether to log the first write. Not before marks were first taken or cleared: until
            then the next checkpoint holds all rows anyway.
    """

    _alive: ClassVar[weakref.WeakSet[WriteWatch]] = weakref.WeakSet()

    def __init__(self, kernel: Kernel, marks: Sequence[Marks]) -> None:
        self.kernel = kernel
        self.marks = marks
        self.stepped = SteppedTables(kernel)
        self.by_hand = SteppedByHand(self.stepped)
        self._seen = self._look()
        self._announced = 0
        self._turn = 0
        self.copies: KernelCopies | None = None
        self.journal: Journal | None = None
        self.spoils = False
        self.read: torch.cuda.Event | None = None
        self.reads: GpuReads | None = None
        device = next((each.device for each in marks if each.device.type != "cpu"), None)
        self.streams = None if device is None else KernelStreams(device, kernel)
        self.late: Callable[[], object] | None = None
        self._warned = self._by_hand = False
        self.updates_to_look_at = _EARLY_UPDATES if self.streams is None else 0
        self._found = self._between_updates = 0
        self.warns = False
        self._alive.add(self)

    @classmethod
    def of(cls, modules: Iterable[object]) -> list[WriteWatch]:
        """Return all trackers' watches on TorchRec's kernel modules."""
        wanted = {id(module) for module in modules}
        return [watch for watch in cls._alive if id(watch.kernel.module) in wanted]

    def check(self) -> None:
        """Mark all rows, for every consumer, if the memory was written since last seen."""
        if self.streams is not None and not self.kernel.data_parallel:
            self.streams.join()  # a dense optimizer's own stream has waited for the gradients
        if self._announced:
            return
        self._mark_stepped_by_hand()
        now = self._look()
        if now == self._seen:
            return
        self.spoil()  # first: the background must not find this write seen and untold
        if self.journal is not None:
            self.journal.written()
        self._turn += 1
        self._found += 1
        self._seen = now
        self._by_hand = self._by_hand or self.warns
        known = all(marks.all_marked() for marks in self.marks)
        for marks in self.marks:
            marks.mark_all()
        if self.warns and not known and not self._warned:
            self._warned = True
            logger.warning(
                "weights or optimizer rows of %s were written outside of training (load_state_dict,"
                " copy_, an assignment …): all rows of these tables count as modified, since it is "
                "unknown which were written. To save only those, write them inside "
                "`with checkpointer.writing(table, rows):` or with write_rows",
                listed(sorted({shard.table for shard in self.kernel.shards})),
            )

    def _mark_stepped_by_hand(self) -> None:
        tables = self.by_hand.changed()
        for table in tables:
            self.marks[table].mark_all()
        if tables and not self._warned:
            self._warned = True
            logger.warning(
                "the program updates data-parallel tables without an optimizer, through .data: all "
                "rows of %s count as modified, since it is unknown which were written. To save "
                "only those, let a torch.optim optimizer step the tables",
                listed(sorted({self.kernel.shards[table].table for table in tables})),
            )

    def is_written(self) -> bool:
        """Tell whether the memory was written, not announced, since last seen; from any thread."""
        while True:
            turn = self._turn
            written = not self._announced and self._look() != self._seen
            if turn == self._turn:
                return written

    def spoil(self) -> None:
        """Fail the checkpoint in progress: rows were written, unannounced, before all were copied.

        The kernel's rows are copied at the cut from now on, lest every checkpoint fail.
        """
        copies, reads = self.copies, self.reads
        if reads is not None and reads.fail(self.written_outside()):
            self.spoils = True
        if copies is None or copies.copies.over:
            return
        self.spoils = True
        copies.copies.fail(self.written_outside())

    def look_early(self) -> None:
        """Look, before an update, for a program that writes rows by hand in each step, whose first
        checkpoint would fail. What it has written before the first update is its start.
        """
        self.check()
        if self.updates_to_look_at < _EARLY_UPDATES:
            self._between_updates += self._found > 0
        self._found = 0
        self.updates_to_look_at -= 1
        self.spoils = self.spoils or self._between_updates >= _OFTEN

    def expect_writes(self) -> None:
        """Copy rows at the cut from now on, if the program has written some by hand."""
        self.check()
        self.spoils = self.spoils or self._by_hand

    def written_outside(self) -> RowsOverwritten:
        """Return the error of a checkpoint whose rows were written, unannounced, before they were
        copied.
        """
        tables = listed(sorted({shard.table for shard in self.kernel.shards}))
        return RowsOverwritten(
            f"weights or optimizer rows of {tables} were written outside of training "
            "(load_state_dict, copy_, an assignment …) while they were being saved, so that the "
            "checkpoint would not be of one instant: it is not committed, its rows are kept for "
            "the next one, and from now on these tables are copied before training goes on. Write "
            "inside `with checkpointer.writing(table, rows):` or with write_rows, and they need "
            "not be"
        )

    def before_write(self, shard: int, ids: torch.Tensor) -> None:
        """Save rows of one shard for the checkpoint in progress, and mark them.

        Args:
            shard: position among the kernel's shards.
            ids: shard-local, as for ``Marks.mark``.
        """
        self.before_change()
        copies = self.copies
        if copies is not None:
            copies.before_write(shard, ids)
        if self.journal is not None:
            self.journal.before_write(shard, ids)
        self.marks[shard].mark(ids)

    def before_change(self) -> None:
        """Make the copies of whole tables for a checkpoint in progress, and have the current stream
        of a GPU wait until rows are copied; the calling thread goes on.
        """
        late = self.late
        if late is not None:
            late()
        if self.read is not None:
            torch.cuda.current_stream(self.marks[0].device).wait_event(self.read)
            if self.read.query():
                self.read = None

    def follow(self, reads: GpuReads) -> None:
        """Have training's streams wait for copies of the tables from a GPU: at the first update,
        where that is all that changes them; or now, as after a write by hand that came before.
        """
        if reads.done is None:
            return
        if self.kernel.changes_in_backward_only and not self.spoils:
            self.read = reads.done
            reads.watch(self)
            return
        if self.streams is not None:
            self.streams.wait_event(reads.done)

    def note_stream(self) -> None:
        """Hear that the kernel is about to update rows on the current stream."""
        if self.streams is not None:
            self.streams.note()

    def before_overwriting(self) -> None:
        """Wait until all rows are saved for the checkpoint in progress."""
        self.before_change()
        copies, reads = self.copies, self.reads
        if reads is not None:
            reads.let_go(self)
        if copies is not None:
            copies.copies.wait_until_over()
        if self.journal is not None:
            self.journal.missed("they were written as a whole")

    def acknowledge(self) -> None:
        """Accept the memory's present content, whose modified rows are marked."""
        if not self._announced:
            self._seen = self._look()

    def flush(self) -> None:
        """Write rows in the GPU cache back to memory, and find the memory again."""
        if self.kernel.data_parallel:
            self.kernel.optimizers.find()
        if self.streams is None:  # no cache to write
            self.check()
            self.kernel.flush()
            return
        self.before_change()
        with announced([self.kernel.module]), self.streams.apart():
            self.kernel.flush()

    def purge(self) -> None:
        """Drop rows in the GPU cache after the memory was written, lest stale ones win."""
        if self.streams is None:
            self.kernel.purge()
            return
        with self.streams.apart():
            self.kernel.purge()
            self.streams.forget_prefetched()

    def _look(self) -> _Look:
        if self.kernel.data_parallel:
            first = self.stepped.weights()[:1]  # all are views of one memory, with one counter
            seen = [_Seen(tensor.data_ptr(), _version(tensor), None) for tensor in first]
            for tensor in self._dense_states():
                seen.append(_Seen(tensor.data_ptr(), _version(tensor), weakref.ref(tensor)))
            return seen
        memory = self.kernel.memory()
        return memory.places, memory.versions()

    def _dense_states(self) -> Iterator[torch.Tensor]:
        """Yield data-parallel tables' rows of optimizer state; every step calls this."""
        for optimizer in self.kernel.optimizers:
            for stepped in self.stepped.of(optimizer):
                rows = stepped.parameter.size(0)
                for state in state_at(optimizer, stepped.parameter).values():
                    if isinstance(state, torch.Tensor) and state.dim() and state.size(0) == rows:
                        yield state


@contextmanager
def announced(modules: Iterable[object]) -> Iterator[None]:
    """Let the block write to kernels' memory whose rows it has marked for all trackers.

    If an exception leaves the block, the next ``WriteWatch.check`` marks all rows.

    Args:
        modules: TorchRec's kernel modules.
    """
    watches = WriteWatch.of(modules)
    for watch in watches:
        watch.check()
        watch._announced += 1
        watch._turn += 1
    try:
        yield
    except BaseException:
        for watch in watches:
            watch._announced -= 1
            watch._turn += 1
        raise
    for watch in watches:
        if watch._announced == 1:  # seen while still announced: the background may look at any time
            watch._seen = watch._look()
            watch.by_hand.forget()
        watch._announced -= 1
        watch._turn += 1


def mark_memory(written: Iterable[torch.Tensor]) -> None:
    """Mark every row, for all trackers, of the kernels that hold one of these tensors, which are
    about to be written.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in written if tensor.numel()}
    for watch in list(WriteWatch._alive):
        # The kernel is asked again: its weights may have moved since the shards were last used.
        weights = watch.kernel.module.split_embedding_weights()
        states = [state for shard in watch.kernel.shards for state in shard.optimizer.values()]
        if any(t.untyped_storage().data_ptr() in memory for t in (*weights, *states)):
            watch.before_overwriting()
            for marks in watch.marks:
                marks.mark_all()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
