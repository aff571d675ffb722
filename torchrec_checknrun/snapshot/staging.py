"""Copy a checkpoint's items out of the model into staging memory.

Items go into the memory in the order in which the background writes them. What training may change
at any time is staged while training waits. Where the memory is too small for that, the background
begins when the memory is full, and staging continues as pieces become free: still one instant,
since training waits until the last of these items is staged. Rows that are copied on write follow
behind, in a thread of their own: training saves those that it is about to change.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch

from torchrec_checknrun.codecs import Settled
from torchrec_checknrun.format.chunk import Entry
from torchrec_checknrun.marks.gpu_streams import GpuReads, wait_for
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.digest import Digest, joint_digest
from torchrec_checknrun.snapshot.encoded_at_cut import copied_size, idle_threads
from torchrec_checknrun.snapshot.items import BlockItem, ChunkItem, Items, RowsItem
from torchrec_checknrun.snapshot.late_copies import LEAST_BYTES, LateCopies
from torchrec_checknrun.snapshot.memory import Ring, StagingAborted, StagingMemory
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot
from torchrec_checknrun.snapshot.staged import (
    Staged,
    StagedChunk,
    StagedJob,
    StagedRows,
    StagedTensor,
    with_encoding,
)
from torchrec_checknrun.threads import ReadyThread

COPIER = "checknrun-copy"
"""Name of the thread that stages the rows that are copied on write."""


class Staging:
    """One checkpoint's items on their way through staging memory.

    Call ``run`` in the training thread, ``start_behind`` in the background; other methods may be
    called by any thread.

    Args:
        ring: an unused ring of the memory's size.
        encode: tables whose rows are encoded during the stall, rather than copied.
        late: copies pieces of states later; None: all are copied at the cut.

    Attributes:
        reads: the copies from a GPU, for which the streams of training must wait before they change
            what is copied; None without any.
    """

    def __init__(
        self,
        memory: StagingMemory,
        ring: Ring,
        items: Items,
        encode: frozenset[str],
        late: LateCopies | None = None,
    ) -> None:
        self.late = late
        self._memory = memory
        self._ring = ring
        self._all = items
        self._items = items.by_name
        self._encode = encode
        self._order: list[str] = []
        """Names of items in the order in which they have taken memory."""
        self._staged: dict[str, tuple[Staged, int, torch.cuda.Event | None]] = {}
        self._digests: dict[str, Digest] = {}
        self._shared_digests: dict[int, str] = {}
        self._wanted: frozenset[str] | None = None
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._at_cut_done = threading.Event()
        self._behind: Mapping[str, RowsItem] = {}
        self._behind_done = True
        self._devices = {
            item.shard.shard.weight.device
            for item in items.by_name.values()
            if isinstance(item, RowsItem)
        }
        gpus = self._devices - {torch.device("cpu")}
        self.reads = GpuReads(*gpus) if gpus else None
        # Copies from a GPU need no processor; copies from CPU tables may use all idle ones. Without
        # rows there is too little to copy.
        self._helpers = idle_threads() if self._devices == {torch.device("cpu")} else 0

    @property
    def at_cut(self) -> Mapping[str, RowsItem | BlockItem | ChunkItem]:
        """Return the items that are staged while training waits, by name."""
        return self._items

    @property
    def later(self) -> list[ShardSnapshot]:
        """Return the shards whose rows are copied after training goes on."""
        return self._all.copied_later

    def digests(self) -> dict[str, Digest]:
        """Digest all items but table rows, by name, as of the snapshot's instant.

        Call this once the background has been started, and before ``choose``.

        Raises:
            BaseException: staging has failed.
        """
        found = dict(self._digests)
        for name in self._dense() - found.keys():
            found[name] = Digest.of(*self._content(name))
        return found

    def shared_digests(self) -> dict[int, str]:
        """Digest the blocks that ranks of another mesh may hold as well, by number; see
        ``digests``. The digests don't depend on how a rank cuts the blocks into pieces.
        """
        found = dict(self._shared_digests)
        for number in self._all.shared.keys() - found.keys():
            contents = map(self._content, self._all.shared[number])
            found[number] = joint_digest(pieces for _, pieces in contents)
        return found

    def _content(self, name: str) -> tuple[Entry, Sequence[bytes | memoryview]]:
        """Return the entry and the bytes of an item other than rows."""
        with self._changed:
            if name not in self._staged:
                assert self._failure is not None
                raise self._failure
            staged, _, _ = self._staged[name]
        assert isinstance(staged, StagedChunk)
        return staged.entry, staged.pieces(self._memory.bytes)

    def _dense(self) -> set[str]:
        return {name for name, item in self._items.items() if not isinstance(item, RowsItem)}

    def _digest_live(self) -> None:
        """Digest the items for which there is no staging memory yet, while training waits."""
        staged = set(self._staged)
        for name in self._dense() - staged:
            chunk = self._items[name].job({})
            self._digests[name] = Digest.of(chunk.entry, chunk.pieces)
        for number, names in self._all.shared.items():
            if not staged.issuperset(names):
                self._shared_digests[number] = self._all.shared_digest(number)

    def _full(self, when_full: Callable[[], None]) -> None:
        """Have the background begin, since there is no memory left."""
        if self.late is not None:  # the background wants whole items
            self.late.make()
            self.late = None
        self._digest_live()
        when_full()

    def run(self, when_full: Callable[[], None]) -> None:
        """Stage all items; return early if the background has given up.

        Args:
            when_full: called once if memory is too small for all items, before the first wait for
                memory: start a thread that releases some.

        Raises:
            Exception: an item could not be encoded; ``job`` raises the same error.
        """
        try:
            self._run(when_full)
        finally:
            if self.reads is not None:
                self._memory.filling = self.reads.done
        if self.late is not None:
            self.late.begin()
        self._at_cut_done.set()
        if self._failure is not None:
            raise self._failure

    def _run(self, when_full: Callable[[], None]) -> None:
        items, turn = iter(self._items.items()), threading.Lock()

        with self._queued() as event:

            def work() -> None:
                try:
                    # Memory is taken in the order in which it is released: else staged items could
                    # wait for items for which there is no memory.
                    while True:
                        with turn:
                            name, item = next(items, ("", None))
                            if item is None or self._failure is not None:
                                return
                            if self._wanted is not None and name not in self._wanted:
                                continue
                            stage, offset = self._place(name, item, partial(self._full, when_full))
                        self._publish(name, (stage(), offset, event()))
                except StagingAborted:
                    return
                except BaseException as error:
                    self.fail(error)

            helpers: list[threading.Thread] = []
            try:
                with suppress(RuntimeError):  # the system gives no more threads
                    for _ in range(self._helpers):
                        helper = threading.Thread(target=work, name="checknrun-stage")
                        helper.start()
                        helpers.append(helper)
                work()
            finally:  # all copies must be of this instant
                for helper in helpers:
                    helper.join()

    def start_behind(
        self,
        found: Mapping[str, RowsItem],
        copies: CutRows | None,
        ready: ReadyThread | None = None,
    ) -> threading.Thread:
        """Start the thread that stages rows behind training; its failures reach ``jobs``.

        Args:
            found: the items by name.
            copies: the rows that are copied on write; None: all are copied whole already.
            ready: a thread that was started ahead.

        Raises:
            RuntimeError: there is none, and the system gives no more threads.
        """
        self._behind, self._behind_done = found, False
        run = functools.partial(self._run_behind, copies)
        thread = None if ready is None else ready.give(run)
        if thread is None:
            thread = threading.Thread(target=run, name=COPIER, daemon=True)
            thread.start()
        return thread

    def _run_behind(self, copies: CutRows | None) -> None:
        """Stage the chunks in order, but where overflow memory is nearly full the one goes next
        that frees most of it.
        """
        try:
            self._at_cut_done.wait()  # memory is taken in order
            left = dict(self._behind)
            while left:
                with self._changed:
                    if self._failure is not None:
                        return
                name = next(iter(left))
                if copies is not None:
                    copies.check()
                    name = copies.most_urgent(left) or name
                item = left.pop(name)
                stage, offset = self._place(name, item, lambda: None)
                self._publish(name, (stage(), offset, None))
                if copies is not None:
                    copies.copies.memory_freed()
            if copies is not None:
                copies.finish()
        except StagingAborted:
            return
        except BaseException as error:
            self.fail(error)
        finally:
            if copies is not None:
                copies.close()
            with self._changed:
                self._behind_done = True
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop staging because of an error, which ``jobs`` raises for items not staged yet."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self._at_cut_done.set()

    def jobs(self, names: Sequence[str], settled: Settled) -> Iterator[StagedJob]:
        """Yield the jobs of the items that this rank is to write, each once staged, in the order of
        their memory.

        Raises:
            BaseException: staging has failed.
        """
        self.choose(frozenset(names))
        left, at = set(names), 0
        while left:
            with self._changed:
                while len(self._order) == at:
                    if self._failure is not None:
                        raise self._failure
                    self._changed.wait()
                name = self._order[at]
            at += 1
            if name in left:
                left.discard(name)
                yield self.job(name, settled)
        if self.reads is not None:
            self.reads.finish()
        with self._changed:  # the last check of the copies comes after the last copy
            while not self._behind_done:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def choose(self, names: frozenset[str]) -> None:
        """Keep the items that this rank is to write, and release the memory of the other items."""
        with self._changed:
            self._wanted = names
            unwanted = [self._staged.pop(name) for name in self._staged.keys() - names]
        for staged in unwanted:
            self._drop(staged)

    def _drop(self, staged: tuple[Staged, int, torch.cuda.Event | None]) -> None:
        """Release the memory of an item, but not while a GPU still copies into it."""
        _, offset, event = staged
        if event is not None:
            wait_for(event)
        self._ring.release(offset)

    def job(self, name: str, settled: Settled) -> StagedJob:
        """Wait until an item is staged, and return its job.

        Raises:
            BaseException: staging has failed.
        """
        with self._changed:
            while name not in self._staged:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            staged, offset, event = self._staged.pop(name)
        if event is not None:
            assert self.reads is not None
            self.reads.wait(event)
        item = self._items.get(name) or self._behind[name]
        if settled and isinstance(item, RowsItem):
            staged = with_encoding(staged, item.encoding.settled(settled))
        return StagedJob(staged, self._memory.bytes, lambda: self._ring.release(offset))

    def _publish(self, name: str, staged: tuple[Staged, int, torch.cuda.Event | None]) -> None:
        with self._changed:
            if self._wanted is None or name in self._wanted:
                self._staged[name] = staged
                self._changed.notify_all()
                return
        self._drop(staged)

    def _place(
        self, name: str, item: RowsItem | BlockItem | ChunkItem, when_full: Callable[[], None]
    ) -> tuple[Callable[[], Staged], int]:
        """Take memory for an item; return a function that stages the item, and the offset."""
        stage, offset = self._take(item, when_full)
        with self._changed:
            self._order.append(name)
            self._changed.notify_all()
        return stage, offset

    def _take(
        self, item: RowsItem | BlockItem | ChunkItem, when_full: Callable[[], None]
    ) -> tuple[Callable[[], Staged], int]:
        memory = self._memory.bytes
        if isinstance(item, RowsItem) and item.shard.shard.table not in self._encode:
            shard, offset = item.shard.shard, self._ring.take(copied_size(item), when_full)
            rows = StagedRows.plan(shard, item.count, item.encoding, offset)

            def copy() -> Staged:
                rows.copy(shard, item.positions(), memory, item.shard.copies)
                return rows

            return copy, offset
        chunk = item.job({})
        offset = self._ring.take(sum(chunk.sizes), when_full)
        at, target, late = offset, memory.numpy().data, self.late
        for piece, length in zip(chunk.pieces, chunk.sizes, strict=True):
            if (
                late is None
                or length < LEAST_BYTES
                or not isinstance(piece, memoryview)
                or not late.add(piece, memory[at : at + length])
            ):
                if type(piece) is memoryview and (piece.format, piece.ndim) != ("B", 1):
                    target[at : at + length] = piece.cast("B")
                else:  # most pieces
                    target[at : at + length] = piece
            at += length
        staged = StagedChunk(chunk.entry, StagedTensor(offset, torch.uint8, (at - offset,)))
        return lambda: staged, offset

    def _queued(self) -> AbstractContextManager[Callable[[], torch.cuda.Event | None]]:
        """Queue the block's copies from a GPU; see ``GpuReads.queued``."""
        return nullcontext(lambda: None) if self.reads is None else self.reads.queued()
