"""Encoded weights and optimizer states of a chunk's rows: decode rows, or select rows undecoded.

Selecting serves restores that need only some rows, and compaction, which joins rows of several
chunks to new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchrec_checknrun.codecs import Codec, Parameters, row_state
from torchrec_checknrun.codecs.base import require_size
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.native import BLOCK_BYTES, Chosen


@dataclass(frozen=True)
class EncodedRows:
    """Encoded weights of rows.

    Attributes:
        data: 1-D uint8, of all rows; without meaning at exceptions.
        count, cols, dtype: of the rows.
        exceptions: sorted int64 positions of the rows stored exactly.
        exact: ``(exceptions, cols)``, the rows stored exactly.
    """

    codec: Codec
    parameters: Parameters
    data: torch.Tensor
    count: int
    cols: int
    dtype: torch.dtype
    exceptions: np.ndarray
    exact: torch.Tensor

    @property
    def raw(self) -> torch.Tensor | None:
        """Return the rows' raw bytes; None if the rows are encoded.

        Raises:
            ValueError: the number of bytes is wrong.
        """
        if not self.codec.verbatim or len(self.exceptions):
            return None
        require_size(self.data, self.count * self.row_bytes, f"{self.count} exact rows")
        return self.data

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a decoded row."""
        return self.cols * self.dtype.itemsize

    def select(self, positions: np.ndarray) -> EncodedRows | None:
        """Return some rows, still encoded, by position; None if the codec can't separate rows."""
        chosen = self.codec.select(
            self.data, self.parameters, self.count, self.cols, torch.from_numpy(positions)
        )
        if chosen is None:
            return None
        exceptions, exact = self._exact(positions)
        return EncodedRows(
            codec=self.codec,
            parameters=chosen[1],
            data=chosen[0],
            count=len(positions),
            cols=self.cols,
            dtype=self.dtype,
            exceptions=exceptions,
            exact=exact,
        )

    def decode(self, start: int, out: torch.Tensor) -> None:
        """Decode rows from ``start`` on, as many as ``out`` has; ``out`` may be on any device."""
        self.codec.decode(self.data, self.parameters, self.count, start, out)
        here = slice(*np.searchsorted(self.exceptions, (start, start + len(out))))
        if here.start < here.stop:
            at = torch.from_numpy(self.exceptions[here] - start)
            out[at.to(out.device)] = self.exact[here].to(out.device)

    def write(self, chosen: Chosen, weight: torch.Tensor, where: Chosen) -> bool:
        """Decode chosen rows into as many rows of a weight, if possible without a temporary.

        Returns:
            Whether the rows were written.
        """
        if isinstance(chosen, slice) and isinstance(where, slice):
            if weight.is_contiguous():
                self.decode(chosen.start, weight[where])
            return weight.is_contiguous()
        positions, ids = _positions(chosen), torch.from_numpy(_positions(where))
        if not self.codec.scatter(
            self.data, self.parameters, self.count, torch.from_numpy(positions), ids, weight
        ):
            return False
        if len(self.exceptions):
            at, exact = self._exact(positions)
            weight[ids[torch.from_numpy(at)]] = exact
        return True

    def _blocks_at_once(self, chosen: Chosen) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode chosen rows in one go, as one block."""
        positions = _positions(chosen)
        memory = torch.empty((len(positions), self.cols), dtype=self.dtype, device="cpu")
        if len(positions) and not self.write(positions, memory, slice(0, len(positions))):
            raise ValueError(f"codec {self.codec.name!r} can't decode rows in one go")
        yield 0, memory

    def _exact(self, positions: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Return which of the given positions are stored exactly, as indices, and their rows."""
        at = np.searchsorted(positions, self.exceptions)
        kept = at < len(positions)
        kept[kept] = positions[at[kept]] == self.exceptions[kept]
        return at[kept], self.exact[torch.from_numpy(kept)]

    def blocks(self, chosen: Chosen, most: int = BLOCK_BYTES) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode chosen rows block by block, each block in the same memory; yield with each block
        the number of rows before it.

        Args:
            most: bytes of a block.
        """
        if self.codec.at_once:
            yield from self._blocks_at_once(chosen)
            return
        size = max(1, most // self.row_bytes)
        rows, positions = self, None
        if isinstance(chosen, slice):
            first, n = chosen.start, chosen.stop - chosen.start
        else:
            first, n = 0, len(chosen)
            selected = self.select(chosen)
            if selected is None:
                positions = chosen
                first, n = int(chosen[0]), int(chosen[-1]) + 1 - int(chosen[0])
            else:
                rows = selected
        memory = torch.empty((min(size, n), self.cols), dtype=self.dtype, device="cpu")
        done = 0
        for start in range(first, first + n, size):
            block = memory[: min(size, first + n - start)]
            rows.decode(start, block)
            if positions is not None:
                here = positions[slice(*np.searchsorted(positions, (start, start + len(block))))]
                block = block[torch.from_numpy(here - start)]
            yield done, block
            done += len(block)


@dataclass(frozen=True)
class EncodedState:
    """An encoded optimizer state of rows.

    Attributes:
        data: 1-D uint8.
        cols: ``()`` if the state is row-wise, of shape ``(n,)``; ``(cols,)`` if pointwise.
    """

    parameters: Parameters
    data: torch.Tensor
    count: int
    cols: tuple[int, ...]
    dtype: torch.dtype

    def checked(self) -> EncodedState:
        """Check the number of bytes; return this state.

        Raises:
            ValueError: the number of bytes is wrong.
        """
        size = self.count * self._row_bytes
        require_size(self.data, size, f"{self.count} rows stored as {self.parameters['scheme']}")
        return self

    @property
    def raw(self) -> torch.Tensor | None:
        """Return the rows' raw bytes; None if the rows are encoded."""
        return self.data if self.parameters["scheme"] == "fp32" else None

    def select(self, positions: np.ndarray) -> EncodedState:
        """Return the state of the rows at given positions, still encoded."""
        if not len(positions):
            return replace(self, data=self.data[:0], count=0)
        chosen = self.data.numpy().view(f"V{self._row_bytes}")[positions].view(np.uint8)
        return replace(self, data=torch.from_numpy(chosen), count=len(positions))

    def decode(self, chosen: Chosen) -> torch.Tensor:
        """Decode the state of chosen rows: ``(n,)`` or ``(n, cols)``."""
        if not isinstance(chosen, slice):
            return self.select(chosen).decode(slice(0, len(chosen)))
        size, n = self._row_bytes, chosen.stop - chosen.start
        data = self.data[chosen.start * size : chosen.stop * size]
        return row_state.decode_row_state(data, self.parameters, (n, *self.cols), self.dtype)

    @property
    def _row_bytes(self) -> int:
        return row_state.state_row_bytes(self.parameters, (self.count, *self.cols), self.dtype)


@dataclass(frozen=True)
class LogState(EncodedState):
    """A row-wise state whose rows are codes of ``log_levels``, or differences of these."""

    def checked(self) -> LogState:
        """Return this state: only decoding tells whether the bytes are right."""
        return self

    @property
    def raw(self) -> None:
        """Return None: the rows are encoded."""

    @classmethod
    def of(cls, codes: np.ndarray) -> LogState:
        """Encode codes that stand alone."""
        data = log_levels.encode(codes)
        return cls({"scheme": row_state.LOGDELTA}, data, len(codes), (), torch.float32)

    def select(self, positions: np.ndarray) -> LogState:
        return self.of(self.codes()[positions])

    def decode(self, chosen: Chosen) -> torch.Tensor:
        return log_levels.values_of(self.codes()[chosen])

    def joined(self, parts: Sequence[EncodedState], places: Sequence[np.ndarray]) -> LogState:
        """Join the state of rows that stand alone.

        Args:
            places: for each part its rows' places among all, sorted.
        """
        found = np.empty(sum(part.count for part in parts), np.int16)
        for part, at in zip(parts, places, strict=True):
            assert isinstance(part, LogState)
            found[at] = part.codes()
        return self.of(found)

    def codes(self, before: np.ndarray | None = None, chosen: slice | None = None) -> np.ndarray:
        """Return the codes of chosen rows, ``(n,)`` int16; see ``log_levels.decode``.

        Raises:
            ValueError: no encoder writes such state, or not upon these predecessors.
        """
        if not row_state.is_log_link(self.parameters):
            before = None
        return log_levels.decode(self.data, self.count, before, chosen)


def _positions(chosen: Chosen) -> np.ndarray:
    return np.arange(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
