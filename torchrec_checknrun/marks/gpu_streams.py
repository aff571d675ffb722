"""Order copies of rows out of a GPU, which are made while training goes on, among other streams.

A cut only queues these copies, on a stream of their own. Training's next update waits for them; a
write by hand that comes earlier waits for nothing, but version counters tell of it. Pipelines look
rows up, update them and prefetch them into a cache on streams that nobody else waits for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from torchrec_checknrun.errors import SaveFailed

_NOT_CACHED = -1
"""A place in FBGEMM's cache for rows that are looked up, and updated, in the memory behind it."""


class Watched(Protocol):
    """A watch on tables whose rows are copied, see ``WriteWatch``."""

    reads: GpuReads | None

    def is_written(self) -> bool:
        """Tell whether the tables were written, not announced, since last seen."""

    def spoil(self) -> None:
        """Fail the copies because of such a write."""


class GpuReads:
    """The copies of one checkpoint's rows out of a GPU.

    The training thread queues them and names the tables that may be written before the copies are
    made; the background waits for copies, and looks each time for such writes.

    Args:
        device: the GPU.

    Attributes:
        done: recorded once all copies are queued; None before that, and without any.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.done: torch.cuda.Event | None = None
        self._watches: list[Watched] = []
        self._failure: SaveFailed | None = None
        self._made = self._over = False
        self._lock = threading.Lock()

    @contextmanager
    def queued(self) -> Iterator[Callable[[], torch.cuda.Event]]:
        """Queue the block's copies on a side stream. Yields a function that records the event for
        which the background waits.
        """
        side, training = _side_stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(training)
        with torch.cuda.stream(side):
            try:
                yield side.record_event
            finally:  # copies that were queued before an error are made as well
                self.done = side.record_event()

    def watch(self, watch: Watched) -> None:
        """Look for writes to tables that training may change, unordered, from now on."""
        with self._lock:
            if not (self._over or watch.reads is self):
                self._watches.append(watch)
                watch.reads = self

    def fail(self, error: SaveFailed) -> bool:
        """Fail the copies, unless all were made before; return whether they failed."""
        with self._lock:
            if not self._over:
                self._failure = self._failure or error
            return not self._over

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for the copies before an event, then look for writes; in the background.

        Raises:
            SaveFailed: a table was written by hand before its rows were copied.
        """
        wait_for(event)
        self._look()

    def finish(self) -> None:
        """Look for writes a last time, once each copy that is wanted was waited for.

        Raises:
            SaveFailed: see ``wait``.
        """
        self._look()
        self.end()

    def let_go(self, watch: Watched) -> None:
        """Wait for all copies, so that tables may be overwritten; in training's thread."""
        if self.done is not None:
            wait_for(self.done)
        if watch.is_written():
            watch.spoil()
        with self._lock:
            self._watches = [each for each in self._watches if each is not watch]
        watch.reads = None

    def end(self) -> None:
        """Look for writes no more: all copies were made, or nobody wants them; idempotent."""
        with self._lock:
            self._over = True
            watches, self._watches = self._watches, []
        for watch in watches:
            if watch.reads is self:
                watch.reads = None

    def _look(self) -> None:
        made = self.done is not None and self.done.query()  # before the look
        for watch in list(self._watches):
            if watch.is_written():
                watch.spoil()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            # PyTorch counts a write once that is queued: only the look after the next is sure.
            over, self._made = self._made, made
        if over:
            self.end()


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for an event, in any thread.

    A thread begins on the first GPU, where another rank's tables are: to wait there would take
    memory for a context.
    """
    with torch.cuda.device(event.device):
        event.synchronize()


def keep_until_used(tensor: torch.Tensor) -> None:
    """Keep a tensor's memory, once freed, from other tensors of the stream on which it was made,
    until the current stream has used it.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class KernelStreams:
    """The streams on which a pipeline has a kernel on a GPU look rows up, update and prefetch them.

    Args:
        device: of the kernel's tables.
        kernel: has TorchRec's module around FBGEMM's, which knows the stream of prefetches.
    """

    def __init__(self, device: torch.device, kernel: Any) -> None:
        self._device = device
        self._kernel = kernel
        self._seen: set[torch.cuda.Stream] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out streams, which can't be copied as models are."""
        return {**vars(self), "_seen": set()}

    def note(self) -> None:
        """Remember the current stream, on which rows are about to be updated."""
        self._seen.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Have the current stream wait for all that the kernel is about to do to rows and marks."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._others(current):
            current.wait_stream(stream)

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Have all streams wait for an event, the current one included."""
        current = torch.cuda.current_stream(self._device)
        for stream in (current, *self._others(current)):
            stream.wait_event(event)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the block's work on the current stream apart from the kernel's on other ones."""
        self.join()
        try:
            yield
        finally:
            current = torch.cuda.current_stream(self._device)
            for stream in self._others(current):
                stream.wait_stream(current)

    def forget_prefetched(self) -> None:
        """Send lookups of prefetched batches to memory, after a purge of the cache.

        Such batches know places in the cache that are for other rows from now on: lookups would
        find those rows, and updates would be lost.
        """
        tbe = self._kernel.module._emb_module
        for places in getattr(tbe, "lxu_cache_locations_list", ()):
            if tbe.prefetch_pipeline:  # which locks places, until the batch's backward
                torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
                    tbe.lxu_cache_locking_counter, places
                )
            places.fill_(_NOT_CACHED)

    def _others(self, current: torch.cuda.Stream) -> list[torch.cuda.Stream]:
        prefetching = getattr(self._kernel.module._emb_module, "prefetch_stream", None)
        return [each for each in {*self._seen, prefetching} if each not in (None, current)]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all checkpoints: CUDA's allocator keeps a pool for each stream."""
    return torch.cuda.Stream(device)
