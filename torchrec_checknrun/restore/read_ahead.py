"""Read small chunks that lie side by side in one request.

An object store answers after tens of milliseconds, however little is asked for: a chain of hundreds
of small tables, chunk by chunk, takes minutes. Chunks are verified one by one as ever, and one that
is not as it was written is read again by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from torchrec_checknrun.format.reader import StoredChunk, read_chunk
from torchrec_checknrun.store.folder import Folder

Read = Callable[[StoredChunk], memoryview]
"""Returns a chunk's content, verified."""

RUN_BYTES = 1 << 20
"""Bytes of one request for several chunks, at most."""
AHEAD_BYTES = 64 << 20
"""Bytes that a ``ReadAhead`` keeps."""
_GAP_BYTES = 64 << 10
"""Bytes of no wanted chunk that are read rather than another request made."""


def runs_of(chunks: Iterable[StoredChunk], most: int = RUN_BYTES) -> Iterator[list[StoredChunk]]:
    """Group chunks, in their order, so that those of a group lie side by side in one file.

    Args:
        most: bytes from a group's first chunk to its last; a single chunk may have more.
    """
    run: list[StoredChunk] = []
    for chunk in chunks:
        if run and not _follows(run, chunk, most):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _follows(run: Sequence[StoredChunk], chunk: StoredChunk, most: int) -> bool:
    last, first = run[-1], run[0]
    gap = chunk.entry.offset - end_of(last)
    return (
        _file(chunk) == _file(last)
        and 0 <= gap <= _GAP_BYTES
        and end_of(chunk) - first.entry.offset <= most
    )


def span(run: Sequence[StoredChunk]) -> int:
    """Return the bytes from a group's first chunk to its last."""
    return end_of(run[-1]) - run[0].entry.offset


def end_of(chunk: StoredChunk) -> int:
    """Return the offset in the file where a chunk ends."""
    return chunk.entry.offset + chunk.entry.length


def _file(chunk: StoredChunk) -> tuple[str, str]:
    return chunk.checkpoint, chunk.file


class Stretch:
    """A group of ``runs_of``, read in one request.

    Args:
        memory: receives the bytes; None: memory is allocated.

    Raises:
        OSError: the storage failed. A file that is missing or too short is no error: its chunks
            are not at hand.
    """

    def __init__(
        self, root: Folder, run: Sequence[StoredChunk], memory: memoryview | None = None
    ) -> None:
        if memory is None:
            memory = memoryview(bytearray(span(run)))
        self._start = run[0].entry.offset
        try:
            folder = root / run[0].checkpoint
            count = folder.read_into(memory[: span(run)], run[0].file, self._start)
        except FileNotFoundError:
            count = 0
        self._data = memory[:count]

    def chunk(self, chunk: StoredChunk) -> memoryview | None:
        """Return a chunk's own bytes, verified; None if they are not here as written."""
        at = chunk.entry.offset - self._start
        if at < 0 or at + chunk.entry.length > len(self._data):
            return None
        data = self._data[at : at + chunk.entry.length]
        return data if xxhash.xxh3_64_hexdigest(data) == chunk.entry.checksum else None


class Run:
    """A group of ``runs_of`` whose chunks are read in their order, from the first wanted one on.

    Args:
        memory: receives the bytes, ``span`` at most.
    """

    def __init__(self, root: Folder, chunks: Sequence[StoredChunk], memory: memoryview) -> None:
        self._root, self._chunks, self._memory = root, chunks, memory
        self._stretch: Stretch | None = None

    def read(self, chunk: StoredChunk) -> memoryview:
        """Read a chunk of rows and verify it; see ``format.reader.read_chunk``."""
        if len(self._chunks) == 1:
            return read_chunk(self._root, chunk, self._memory)
        if self._stretch is None:
            wanted = self._chunks[self._chunks.index(chunk) :]
            self._stretch = Stretch(self._root, wanted, self._memory)
        held = self._stretch.chunk(chunk)
        return read_chunk(self._root, chunk) if held is None else held


class ReadAhead:
    """A reader of chunks for one thread, in any order: it keeps the groups that were read last.

    Args:
        chunks: all that may be read; what they are differences to may be read as well.
        most: bytes to keep.
    """

    def __init__(
        self, root: Folder, chunks: Iterable[StoredChunk], most: int = AHEAD_BYTES
    ) -> None:
        self._root = root
        self._left = most
        self._runs: dict[str, list[StoredChunk]] = {}
        self._held: OrderedDict[str, Stretch] = OrderedDict()
        files: dict[tuple[str, str], dict[str, StoredChunk]] = {}
        for chunk in chunks:
            link: StoredChunk | None = chunk
            while link is not None and link.key not in files.setdefault(_file(link), {}):
                files[_file(link)][link.key] = link
                link = link.base
        size = min(RUN_BYTES, most // max(1, len(files)))  # so that one of each file may be kept
        for of_file in files.values():
            in_file = sorted(of_file.values(), key=lambda chunk: (chunk.entry.offset, chunk.number))
            for run in runs_of(in_file, size):
                if len(run) > 1:
                    self._runs |= dict.fromkeys((chunk.key for chunk in run), run)

    def read(self, chunk: StoredChunk) -> memoryview:
        """Read a chunk's content and verify it; see ``format.reader.read_chunk``."""
        return read_chunk(self._root, chunk, at_hand=self.at_hand)

    def at_hand(self, chunk: StoredChunk) -> memoryview | None:
        """Return a copy of a chunk's own bytes, verified, after reading its group; None if it is in
        none, or if the bytes are not as written.
        """
        run = self._runs.get(chunk.key)
        if run is None:
            return None
        first = run[0].key
        if first in self._held:
            self._held.move_to_end(first)
        else:
            self._left -= span(run)
            while self._left < 0 and self._held:
                gone, _ = self._held.popitem(last=False)
                self._left += span(self._runs[gone])
            self._held[first] = Stretch(self._root, run)
        found = self._held[first].chunk(chunk)
        return None if found is None else memoryview(bytearray(found))  # else all would be kept
