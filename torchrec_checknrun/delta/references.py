"""Define what keeps the predecessors of the next link: what the rows of a shard restore to.

Each codec whose links build on them keeps them in its own way; saves, restores, compaction and
readers treat all alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.delta.grid import Grid
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
    """What the rows of one shard restore to.

    Args:
        table: the table's name.
        rectangle: the shard's rows and columns.

    Attributes:
        digest: of all rows, modulo 2**64.
    """

    keeps_bits: ClassVar[bool]
    """Whether ``gather`` returns the bits of rows that are stored bit for bit."""

    def __init__(self, table: str, rectangle: Rectangle) -> None:
        self.table = table
        self.rectangle = rectangle
        self.columns = (rectangle.col_start, rectangle.col_stop)
        self.digest = 0

    @staticmethod
    @abstractmethod
    def expected_bytes(rectangle: Rectangle) -> int:
        """Estimate the memory for a shard's rows."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that is taken."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows; the memory stays for the next ones."""

    @abstractmethod
    def gather(self, positions: np.ndarray) -> Grid:
        """Return rows by position in the shard, ``(n,)`` int64.

        Unless ``keeps_bits``, the codes of rows stored bit for bit are not known, and 0.
        """

    @abstractmethod
    def scatter(self, positions: np.ndarray, rows: Grid) -> None:
        """Replace rows by position in the shard, ``(n,)`` int64, all different.

        Raises:
            ValueError: such rows can't be kept here.
        """

    @abstractmethod
    def undo(self, positions: np.ndarray) -> Undo:
        """Copy rows, to be put back."""

    @abstractmethod
    def part(self, rectangle: Rectangle) -> References:
        """Copy a range of the rows; return these references themselves for the whole range."""


EncodeUpon = Callable[[References, np.ndarray, Note], tuple[torch.Tensor, Restored]]
"""Encodes rows upon references, which keep the new rows in turn.

Takes the references, the rows' positions in the shard, ``(n,)`` int64, sorted and distinct, and
what notes how to undo the change; returns the payload, 1-D uint8, and the new rows, as long as the
references hold them. If it raises ValueError, the references are as they were.
"""
