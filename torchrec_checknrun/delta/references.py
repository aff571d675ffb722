"""Define what keeps the predecessors of the next link: what the rows of a shard restore to.

Each codec whose links build on them keeps them in its own way; saves, restores, compaction and
readers treat all alike. Optimizer state that is stored as logarithmic differences is kept beside.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch

from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.digest import WORD
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.delta.log_references import LogReferences
from torchrec_checknrun.shards import Rectangle

BLOCK_ROWS = 1 << 16
"""Rows that are copied at a time."""

Undo = Callable[[], object]
"""Puts rows of references back as they were; the caller sees to the digest."""
Note = Callable[[Undo], object]
"""Receives an ``Undo`` before the new rows can be lost by an error."""
Restored = Callable[[np.ndarray], Grid]
"""Returns what some of the encoded rows restore to, by their positions among these."""


class References(ABC):
    """The values that the rows of one shard restore to.

    Several threads may gather and scatter at once, each other rows.

    Args:
        table: the table's name.
        rectangle: the shard's rows and columns.
        states: names of the row-wise optimizer states to keep as well.

    Attributes:
        weights_digest: of all rows' weights, modulo 2**64.
        states: the kept states, by name.
    """

    keeps_bits: ClassVar[bool]
    """True if ``gather`` returns the bits of rows that are stored bit for bit."""

    def __init__(self, table: str, rectangle: Rectangle, states: Iterable[str] = ()) -> None:
        self.table = table
        self.rectangle = rectangle
        self.columns = (rectangle.col_start, rectangle.col_stop)
        self.weights_digest = 0
        self._lock = threading.Lock()
        self.states = {name: LogReferences(name, rectangle) for name in sorted(states)}

    @staticmethod
    @abstractmethod
    def expected_bytes(rectangle: Rectangle, states: int = 0) -> int:
        """Estimate the memory for a shard's rows with so many states."""

    @property
    def digest(self) -> int:
        """Return the digest of all rows with the states that are kept, modulo 2**64."""
        return (self.weights_digest + sum(one.digest for one in self.states.values())) % WORD

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Return the memory that is taken, in bytes."""
        return sum(one.bytes for one in self.states.values())

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows; the memory stays for the next ones."""
        self.weights_digest = 0
        for one in self.states.values():
            one.clear()

    def digests_as_now(self) -> Undo:
        """Remember the digests, to be put back."""
        weights, states = self.weights_digest, {n: one.digest for n, one in self.states.items()}

        def put_back() -> None:
            self.weights_digest = weights
            for name, digest in states.items():
                self.states[name].digest = digest

        return put_back

    def _take_states(self, other: References) -> None:
        """Copy the states of these rows from references of more rows and the same columns."""
        for name, one in self.states.items():
            one.copy_from(other.states[name])

    @abstractmethod
    def gather(self, positions: np.ndarray) -> Grid:
        """Return rows by position in the shard, ``(n,)`` int64.

        Unless ``keeps_bits``, the codes of rows stored bit for bit are not known, and 0.
        """

    @abstractmethod
    def scatter(self, positions: np.ndarray, rows: Grid, before: Grid | None = None) -> None:
        """Replace rows by position in the shard, ``(n,)`` int64, sorted and distinct.

        Args:
            before: the rows as ``gather`` returns them now, if they are at hand.

        Raises:
            ValueError: such rows can't be kept here.
        """

    def _count(self, gone: int, new: int) -> None:
        """Count rows' digests in the place of those of the rows before, while no other thread
        does.
        """
        self.weights_digest = (self.weights_digest - gone + new) % WORD

    @abstractmethod
    def undo(self, positions: np.ndarray) -> Undo:
        """Copy rows, to be put back."""

    @abstractmethod
    def part(self, rectangle: Rectangle) -> References:
        """Copy a range of the rows; return these references themselves for the whole range."""


_T_co = TypeVar("_T_co", covariant=True)


class Upon(Protocol[_T_co]):
    """Encodes rows, or their state, upon references, which keep the new ones in turn."""

    def __call__(self, references: References, positions: np.ndarray, note: Note, /) -> _T_co:
        """Encode.

        Args:
            positions: of the rows in the shard, ``(n,)`` int64, sorted and distinct.
            note: notes how to undo the change.

        Raises:
            ValueError: nothing was changed.
        """


def encode_state_upon(
    references: References,
    positions: np.ndarray,
    note: Note,
    *,
    name: str,
    state: torch.Tensor,
) -> torch.Tensor:
    """Encode a row-wise state upon its predecessors; see ``Upon`` and ``log_levels.encode``.

    Args:
        name: of a state that the references keep.
        state: ``(n,)`` float32, on any device.

    Returns:
        The payload, 1-D uint8.
    """
    held = references.states[name]
    codes, before = log_levels.codes_of(state), held.gather(positions)
    payload = log_levels.encode(codes, before)
    note(partial(held.put_back, positions, before))
    held.scatter(positions, codes, before)
    return payload
