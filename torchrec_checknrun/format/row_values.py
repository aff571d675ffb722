"""Rows as they are stored: which bytes are whose, what they decode to, and where to.

A chunk's weights and its optimizer states, each with a way to take some rows out without decoding
them: for a restore that wants only these, and for a chunk that is to hold only these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchrec_checknrun.codecs import Codec, Parameters, row_state
from torchrec_checknrun.codecs.base import require_size
from torchrec_checknrun.native import BLOCK_BYTES, Chosen


@dataclass(frozen=True)
class EncodedRows:
    """Rows' weights as they are stored.

    Attributes:
        data: 1-D uint8; of all rows, but what is at exceptions means nothing.
        count, cols, dtype: of the rows.
        exceptions: sorted int64 positions of the rows that are stored exactly.
        exact: ``(exceptions, cols)``, those rows.
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
        """The rows' own bytes; None if they are encoded.

        Raises:
            ValueError: there are more or fewer.
        """
        if not self.codec.verbatim or len(self.exceptions):
            return None
        require_size(self.data, self.count * self.row_bytes, f"{self.count} exact rows")
        return self.data

    @property
    def row_bytes(self) -> int:
        """Of a decoded row."""
        return self.cols * self.dtype.itemsize

    def select(self, positions: np.ndarray) -> EncodedRows | None:
        """Those rows alone, still encoded; None if the codec can't tell them apart."""
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
        """Rows from ``start`` on, as many as ``out`` has, which may be on any device."""
        self.codec.decode(self.data, self.parameters, self.count, start, out)
        here = slice(*np.searchsorted(self.exceptions, (start, start + len(out))))
        if here.start < here.stop:
            at = torch.from_numpy(self.exceptions[here] - start)
            out[at.to(out.device)] = self.exact[here].to(out.device)

    def write(self, chosen: Chosen, weight: torch.Tensor, where: Chosen) -> bool:
        """Decodes chosen rows into as many rows of a weight, if that is possible at once.

        Returns:
            Whether it was.
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

    def _exact(self, positions: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        """Which of those rows are stored exactly, as positions among them, and these rows."""
        at = np.searchsorted(positions, self.exceptions)
        kept = at < len(positions)
        kept[kept] = positions[at[kept]] == self.exceptions[kept]
        return at[kept], self.exact[torch.from_numpy(kept)]

    def blocks(self, chosen: Chosen) -> Iterator[tuple[int, torch.Tensor]]:
        """Chosen rows, decoded, some at a time, each time in the same memory; and how many there
        were before.
        """
        size = max(1, BLOCK_BYTES // self.row_bytes)
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
    """Rows' optimizer state as it is stored.

    Attributes:
        data: 1-D uint8.
        width: values of each row.
        rowwise: one value, as ``(n,)``.
    """

    parameters: Parameters
    data: torch.Tensor
    count: int
    width: int
    dtype: torch.dtype
    rowwise: bool

    def checked(self) -> EncodedState:
        """Itself.

        Raises:
            ValueError: it isn't as long as it should be.
        """
        values = self.count * self.width
        size = values * row_state.state_row_bytes(self.parameters, self.dtype)
        require_size(self.data, size, f"{values} values stored as {self.parameters['scheme']}")
        return self

    @property
    def raw(self) -> torch.Tensor | None:
        """The rows' own bytes; None if they are encoded."""
        return self.data if self.parameters["scheme"] == "fp32" else None

    def select(self, positions: np.ndarray) -> EncodedState:
        """Those rows' alone, still encoded."""
        size = self.width * row_state.state_row_bytes(self.parameters, self.dtype)
        if not len(positions):
            return replace(self, data=self.data[:0], count=0)
        chosen = self.data.numpy().view(f"V{size}")[positions].view(np.uint8)
        return replace(self, data=torch.from_numpy(chosen), count=len(positions))

    def decode(self, chosen: Chosen) -> torch.Tensor:
        """Of chosen rows, ``(n,)`` or ``(n, cols)``."""
        if not isinstance(chosen, slice):
            return self.select(chosen).decode(slice(0, len(chosen)))
        size = self.width * row_state.state_row_bytes(self.parameters, self.dtype)
        n = chosen.stop - chosen.start
        data = self.data[chosen.start * size : chosen.stop * size]
        values = row_state.decode_row_state(data, self.parameters, n * self.width, self.dtype)
        return values if self.rowwise else values.view(n, self.width)


def _positions(chosen: Chosen) -> np.ndarray:
    return np.arange(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
