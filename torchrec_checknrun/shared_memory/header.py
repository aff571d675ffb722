"""Read and write the first pages of an image: words, and records that are whole or not there.

A word is stored at once, after everything that was stored before it; a kill leaves the old value or
the new one. Each word holds its own check: one that anything else has changed is found. A record
has two places: the one that is not valid is written, checked by a checksum, and named by a higher
number. So a kill in the middle of writing leaves the record before it; a place that is neither
whole nor being written is damage, since the record before it may be out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import torch

from torchrec_checknrun.shared_memory.file import PAGE, NoImage, up

MAGIC = 0x35474D494B43
"""The first six bytes: ``CKIMG5``."""
HEAD_BYTES = 64
"""Before a record's content: words for its number, its bytes and its check, and free ones, so that
the content begins where a line of the processor's cache does.
"""

Piece = torch.Tensor
"""``(n,)`` uint8 in CPU memory."""


class Word(IntEnum):
    """Places of single words in the first page."""

    MAGIC = 0
    OWNER = 1
    """The process that has the image, see ``file.this_process``."""
    READY = 2
    """1 while the image can be used: not while it is filled, or overwritten by a restore."""
    DONE = 3
    """The newest step whose end is in the image."""
    FLOOR = 4
    """The oldest step that can be gone back to, because of changes that were not journaled."""
    TIME = 5
    """When the last step was done, in seconds since 1970."""
    GOAL = 6
    """One more than the step that a recovery is going back to, and the only one that can be gone
    back to until it has ended; 0: none.
    """
    BY_HAND = 7
    """Bits for a program that writes rows by hand in each step: 1, after its first update of
    tables; 2, before.
    """
    JOURNAL_FROM = 8
    """The step that a journal goes back to, of each of two; -1: none."""
    JOURNAL_USED = 10
    """Bytes of a journal, of each of two."""


USED = tuple(sorted({*Word, Word.JOURNAL_FROM + 1, Word.JOURNAL_USED + 1}))
"""The places of all words."""


class Words:
    """Words of eight bytes in shared memory: 48 bits of value and their check.

    Args:
        page: ``(PAGE,)`` uint8.
    """

    def __init__(self, page: torch.Tensor) -> None:
        self.tensor = page.view(torch.int64)

    def __getitem__(self, at: int) -> int:
        try:
            value: int = torch.ops.checknrun.load_word(self.tensor, at)
        except ValueError:
            raise NoImage(f"word {at} of its first page is damaged") from None
        return value

    @property
    def begin_an_image(self) -> bool:
        """Return whether the first word is that of an image."""
        try:
            return self[Word.MAGIC] == MAGIC
        except NoImage:
            return False

    def clear(self) -> None:
        """Store 0 in all words."""
        for at in USED:
            self.publish(at, 0)

    def verify(self) -> None:
        """Check all words.

        Raises:
            NoImage: one was changed by something else than ``publish``.
        """
        for at in USED:
            _ = self[at]

    def publish(self, at: int, value: int) -> None:
        """Store a word, after everything that was stored before."""
        torch.ops.checknrun.store_word(self.tensor, at, value)


class Place:
    """Memory for one version of a record.

    Args:
        memory: ``(n,)`` uint8, in shared memory.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._words = memory[:HEAD_BYTES].view(torch.int64)
        self._head = self._words.numpy()  # the same: read at less cost
        self._content = memory[HEAD_BYTES:]

    @property
    def capacity(self) -> int:
        """Return the most bytes that the content may have."""
        return self._content.nbytes

    @property
    def number(self) -> int:
        """Return the number of what is there; below 0: nothing, or it was being written."""
        return int(self._head.item(0))

    def write(self, number: int, pieces: Sequence[Piece]) -> None:
        """Replace the content by pieces; then a reader finds this number.

        Raises:
            ValueError: they don't fit; there is nothing to be read then.
        """
        torch.ops.checknrun.write_record(self._memory, HEAD_BYTES, pieces, number)

    def read(self) -> tuple[int, memoryview] | None:
        """Return number and content, in shared memory; None if there is nothing whole."""
        number, size, check = self._head[:3].tolist()
        if number < 0 or not 0 <= size <= self.capacity:
            return None
        content = self._content[:size]
        if torch.ops.checknrun.record_check(content, number) != check:
            return None
        return number, content.numpy().data.toreadonly()

    @property
    def is_damaged(self) -> bool:
        """Return whether there is something that was not being written, and is not whole."""
        head = self._head[:3].tolist()
        return head[0] != -1 and head != [0, 0, 0] and self.read() is None

    def clear(self) -> None:
        """Leave nothing to be read."""
        torch.ops.checknrun.publish(self._words, 0, -1)


class Record:
    """Plain values that change rarely, in one of two places.

    Args:
        memory: ``(n,)`` uint8, in shared memory; half of it for each place.
        kind: the type of the values.
    """

    def __init__(self, memory: torch.Tensor, kind: Any) -> None:
        half = len(memory) // 2
        self._places = [Place(memory[:half]), Place(memory[half:])]
        self._kind = kind

    def write(self, value: object) -> None:
        """Replace the value.

        Raises:
            NoImage: it is too large.
        """
        data = msgspec.json.encode(value)
        found = [place.read() for place in self._places]
        numbers = [-1 if each is None else each[0] for each in found]
        older = self._places[numbers.index(min(numbers))]
        if len(data) > older.capacity:
            raise NoImage(f"its description takes {len(data)} bytes, more than {older.capacity}")
        older.write(max(*numbers, 0) + 1, [as_piece(data)])

    def read(self) -> Any:
        """Return the newest whole value.

        Raises:
            NoImage: there is none, or what may be the newest one is damaged.
        """
        if any(place.is_damaged for place in self._places):
            raise NoImage("its description is damaged")
        found = [each for place in self._places if (each := place.read()) is not None]
        if not found:
            raise NoImage("its description is damaged")
        try:
            return msgspec.json.decode(max(found, key=lambda each: each[0])[1], type=self._kind)
        except msgspec.MsgspecError as error:
            raise NoImage(f"its description is damaged ({error})") from None


LAYOUT_BYTES = up(1 << 18)
LINEAGE_BYTES = up(1 << 17)
FIRST_BYTES = PAGE + LAYOUT_BYTES + LINEAGE_BYTES
"""Bytes of words and records, before all areas."""


def as_piece(data: bytes | memoryview) -> Piece:
    """Return bytes as a piece: the memory of a view that can be written to, else a copy."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    fixed = isinstance(data, bytes) or data.readonly  # of which PyTorch warns
    return torch.frombuffer(bytearray(data) if fixed else data, dtype=torch.uint8)
