"""Coalesce reads: small parts of files that lie side by side are read in one request.

An object store answers after tens of milliseconds, however little is asked for: hundreds of small
tables, read one by one, take minutes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import at_once

RUN_BYTES = 1 << 20
"""Bytes of one request for several parts, at most."""
KEPT_BYTES = 64 << 20
"""Bytes of runs that are kept for the parts that are asked for next."""
_GAP_BYTES = 64 << 10
"""Bytes of no wanted part that are read rather than another request made."""


class Place(NamedTuple):
    """A part of a file, in bytes."""

    folder: str
    file: str
    offset: int
    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


class Placed(Protocol):
    """An object that lies in a file."""

    @property
    def place(self) -> Place: ...


P = TypeVar("P", bound=Placed)
P_co = TypeVar("P_co", bound=Placed, covariant=True)


@dataclass(frozen=True)
class Run(Generic[P_co]):
    """Parts that lie side by side in one file, in their order.

    Attributes:
        size: bytes from the first part to the last.
    """

    parts: Sequence[P_co]
    size: int


def coalesced(parts: Iterable[P], most: int = RUN_BYTES) -> list[Run[P]]:
    """Group parts, in their order, into runs.

    Args:
        most: bytes of a run; a single part may have more.
    """
    found: list[list[P]] = []
    for part in parts:
        if found and _follows(found[-1], part.place, most):
            found[-1].append(part)
        else:
            found.append([part])
    return [Run(run, run[-1].place.stop - run[0].place.offset) for run in found]


def _follows(run: Sequence[Placed], place: Place, most: int) -> bool:
    first, last = run[0].place, run[-1].place
    return (
        place[:2] == last[:2]
        and 0 <= place.offset - last.stop <= _GAP_BYTES
        and place.stop - first.offset <= most
    )


class RunBytes:
    """The bytes of a run, read in one request when a part is asked for first.

    Args:
        memory: receives the bytes; None: memory is allocated.
    """

    def __init__(self, root: Folder, run: Run[Placed], memory: memoryview | None = None) -> None:
        self._root, self._run, self._memory = root, run, memory
        self._data: memoryview | None = None

    def part(self, place: Place) -> memoryview | None:
        """Return a part's bytes, in the memory of the run; None if the file ends before, or if
        there is no such file (yet).

        Raises:
            OSError: the storage failed.
        """
        if self._data is None:
            self._data = self._read()
        at = place.offset - self._run.parts[0].place.offset
        return self._data[at : at + place.length] if at + place.length <= len(self._data) else None

    def _read(self) -> memoryview:
        size = self._run.size
        memory = memoryview(bytearray(size)) if self._memory is None else self._memory[:size]
        folder, file, offset, _ = self._run.parts[0].place
        try:
            return memory[: (self._root / folder).read_into(memory, file, offset)]
        except FileNotFoundError:
            return memory[:0]


class CoalescedReads:
    """Reads of parts by one thread, in any order: the runs that were read last are kept.

    Args:
        parts: all that may be asked for.
        most: bytes to keep.
        ahead: read as many runs, and small parts that lie beside no other, as are kept: several at
            once, now.

    Raises:
        OSError: the storage failed.
    """

    def __init__(
        self, root: Folder, parts: Iterable[Placed], most: int = KEPT_BYTES, ahead: bool = False
    ) -> None:
        self._root = root
        self._left = most
        self._runs: dict[Place, Run[Placed]] = {}
        self._held: OrderedDict[Place, RunBytes] = OrderedDict()
        in_files = sorted(parts, key=lambda part: part.place)
        files = {part.place[:2] for part in in_files}
        for run in coalesced(in_files, min(RUN_BYTES, most // max(1, len(files)))):
            if len(run.parts) > 1 or (ahead and run.size <= RUN_BYTES):
                self._runs |= dict.fromkeys((part.place for part in run.parts), run)
        if ahead:
            self._read_ahead()

    def _read_ahead(self) -> None:
        for run in self._runs.values():
            first = run.parts[0].place
            if first not in self._held and run.size <= self._left:
                self._left -= run.size
                self._held[first] = RunBytes(self._root, run)
        reads = [partial(held.part, place) for place, held in self._held.items()]
        at_once(reads, "checknrun-ahead")

    def part(self, place: Place) -> memoryview | None:
        """Return a copy of a part's bytes; None if it lies beside no other, or as
        ``RunBytes.part``.
        """
        run = self._runs.get(place)
        if run is None:
            return None
        first = run.parts[0].place
        if first in self._held:
            self._held.move_to_end(first)
        else:
            self._left -= run.size
            while self._left < 0 and self._held:
                gone, _ = self._held.popitem(last=False)
                self._left += self._runs[gone].size
            self._held[first] = RunBytes(self._root, run)
        found = self._held[first].part(place)
        return None if found is None else memoryview(bytearray(found))  # else all would be kept
