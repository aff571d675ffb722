"""Keep the codes of a row-wise optimizer state, by ``log_levels``, beside the rows of references.

A digest covers them: the sum over rows of the code, counted from ``NONE``, times an odd number that
follows from id, columns and the state's name.
"""

from __future__ import annotations

import threading

import numpy as np
import xxhash

from torchrec_checknrun.delta.digest import WORD, Columns, mixed
from torchrec_checknrun.delta.log_levels import NONE
from torchrec_checknrun.shards import Rectangle


class LogReferences:
    """The codes that one row-wise state of a shard's rows restores to.

    Args:
        state: the state's name.
        rectangle: the shard's rows and columns.

    Attributes:
        digest: of all rows, modulo 2**64.
    """

    def __init__(self, state: str, rectangle: Rectangle) -> None:
        self._rectangle = rectangle
        self._seed = seed_of(state, (rectangle.col_start, rectangle.col_stop))
        self._codes = np.full(rectangle.rows, NONE, np.int16)
        self.digest = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Return the memory that is taken, in bytes."""
        return self._codes.nbytes

    def clear(self) -> None:
        """Forget all rows."""
        self._codes[:] = NONE
        self.digest = 0

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """Return codes by position in the shard, ``(n,)`` int16; ``NONE`` where not known."""
        return self._codes[positions]

    def scatter(self, positions: np.ndarray, codes: np.ndarray, before: np.ndarray) -> None:
        """Replace codes; several threads may, each other rows'.

        Args:
            positions: ``(n,)`` int64, all different.
            codes: ``(n,)`` int16.
            before: those that ``gather`` returns now.
        """
        change = codes.astype(np.int64) - before  # first: before may be a view of these
        change *= self._factors(positions)
        self._codes[positions] = codes
        with self._lock:
            self.digest = (self.digest + int(change.sum())) % WORD

    def put_back(self, positions: np.ndarray, codes: np.ndarray) -> None:
        """Replace codes by recorded ones; the caller sees to the digest."""
        self._codes[positions] = codes

    def copy_from(self, other: LogReferences) -> None:
        """Take the codes of these rows from references of more rows and the same columns."""
        start = self._rectangle.row_start - other._rectangle.row_start
        rows = np.arange(self._rectangle.rows)
        self.clear()
        self.scatter(rows, other._codes[start : start + len(rows)], self._codes)

    def _factors(self, positions: np.ndarray) -> np.ndarray:
        """Return rows' odd numbers, ``(n,)`` int64."""
        ids = (positions + self._rectangle.row_start).view(np.uint64)
        ids ^= self._seed
        return (mixed(ids) | np.uint64(1)).view(np.int64)


def seed_of(state: str, columns: Columns) -> np.uint64:
    """Return what the numbers of all rows have in common."""
    start, stop = mixed(np.array(columns, np.uint64))
    name = np.uint64(xxhash.xxh3_64_intdigest(state.encode()))
    return np.uint64(mixed(np.array([start ^ stop << np.uint64(1) ^ name]))[0])
