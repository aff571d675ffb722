"""Hold rows, taken out of their chunks, until the chunk that they go to is written.

The rows of one chunk of a differential checkpoint go to many chunks of a compacted one. So that
each chunk is read once, and verified whole, its rows wait here: in memory up to a budget, and
beyond it in a temporary file on this machine (in ``$TMPDIR``).
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import torch

from torchrec_checknrun.compaction.row_pieces import Piece
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.values.tensor_bytes import raw_bytes

SPOOL_BYTES = 64 << 20
"""Bytes of rows that wait in memory; as many as a chunk that is compressed may have, decoded."""


@dataclass(frozen=True)
class _Kept:
    """A piece whose bytes are in the spool.

    Attributes:
        empty: the piece, without its bytes.
        offset: of the first part.
        lengths: of the parts, in bytes; see ``_parts``.
    """

    empty: Piece
    offset: int
    lengths: tuple[int, ...]


class Spool:
    """Pieces of rows by the number of the range of rows that they lie in.

    Args:
        file: empty; holds the bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = 0
        self._kept: dict[int, list[_Kept]] = {}

    @classmethod
    @contextmanager
    def opened(cls, memory: int = SPOOL_BYTES) -> Iterator[Spool]:
        """Make a spool; delete it when the block ends.

        Args:
            memory: bytes that are kept in memory.
        """
        with tempfile.SpooledTemporaryFile(max_size=memory) as file:
            yield cls(file)

    def put(self, number: int, piece: Piece) -> None:
        """Add a piece to a range.

        Raises:
            StorageFailed: the temporary file can't be made or written.
        """
        parts = _parts(piece)
        kept = _Kept(_emptied(piece), self._end, tuple(part.nbytes for part in parts))
        with _telling():
            self._file.seek(self._end)
            for part in parts:
                self._file.write(part)
        self._end += sum(kept.lengths)
        self._kept.setdefault(number, []).append(kept)

    def take(self, number: int) -> list[Piece]:
        """Return a range's pieces, in the order in which they were added, and forget them."""
        return [self._read(kept) for kept in self._kept.pop(number, ())]

    def _read(self, kept: _Kept) -> Piece:
        with _telling():
            self._file.seek(kept.offset)
            parts = [bytearray(self._file.read(length)) for length in kept.lengths]
        return _filled(kept.empty, parts)


@contextmanager
def _telling() -> Iterator[None]:
    """Tell errors of the temporary file from those of the storage, of which users think first."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            error.errno or errno.EIO,
            f"rows that wait for their chunk go to a temporary file of this machine: {error}: free "
            "some space, or name another folder by TMPDIR in the environment",
        ) from error


def _parts(piece: Piece) -> list[memoryview]:
    """List a piece's bytes: ids, weights, positions and values of exact rows, states."""
    weight = piece.weight
    states = [state.data for state in piece.states.values()]
    positions = [torch.from_numpy(each) for each in (piece.ids, weight.exceptions)]
    parts = [positions[0], weight.data, positions[1], weight.exact, *states]
    return [memoryview(raw_bytes(part)) for part in parts]


def _emptied(piece: Piece) -> Piece:
    nothing = _tensor(bytearray())
    none = np.empty(0, dtype=np.int64)
    weight = replace(piece.weight, data=nothing, exceptions=none, exact=nothing)
    states = {name: replace(state, data=nothing) for name, state in piece.states.items()}
    return replace(piece, ids=none, weight=weight, states=states)


def _filled(empty: Piece, parts: Sequence[bytearray]) -> Piece:
    ids, data, exceptions, exact, *states = map(_tensor, parts)
    weight, cols = empty.weight, empty.weight.cols
    weight = replace(
        weight,
        data=data,
        exceptions=exceptions.view(torch.int64).numpy(),
        exact=exact.view(weight.dtype).view(-1, cols),
    )
    named = zip(empty.states.items(), states, strict=True)
    filled = {name: replace(state, data=part) for (name, state), part in named}
    return replace(empty, ids=ids.view(torch.int64).numpy(), weight=weight, states=filled)


def _tensor(data: bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)
