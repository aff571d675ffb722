"""Decode a chunk's rows: first the ids, then only the rows that a restore takes from the chunk.

Rows stored as raw bytes are copied from the chunk straight into a table's memory. Encoded rows are
decoded there if consecutive, and otherwise a block at a time, which stays in the processor's cache
until it is written to its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from torchrec_checknrun.codecs import Chained
from torchrec_checknrun.delta.references import References
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format import row_ids
from torchrec_checknrun.format.chunk import open_sections, part_most
from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.format.row_values import EncodedRows, EncodedState, LogState
from torchrec_checknrun.native import BLOCK_BYTES, Chosen, part_of, try_copy_rows
from torchrec_checknrun.shards import LocalShard, Rows

CONVERTED_BYTES = 1 << 21
"""Bytes of rows that are converted at a time: smaller blocks take longer in Python than the
processor's caches save.
"""
_NONE = np.empty(0, dtype=np.int64)


class StoredRows:
    """A chunk of rows in memory, decoded on demand.

    Args:
        payload: the chunk's bytes, writable; must outlive this object.

    Attributes:
        ids: ``(n,)`` int64, sorted, global.

    Raises:
        CorruptCheckpoint: header and payload don't match; every method may raise it.
    """

    def __init__(self, header: RowsHeader, payload: memoryview) -> None:
        self.header = header
        n, cols = header.count, header.cols
        first, last = header.rectangle.row_start, header.rectangle.row_stop - 1
        with self.refusing():
            self._sections = open_sections(header.sections, payload, part_most(n, cols))
            self.ids = row_ids.decode(header.ids_encoding, next(self._sections), first, last, n)
        self._others: list[memoryview] | None = None
        self._weight: EncodedRows | None = None
        self._states: dict[str, EncodedState] | None = None
        self._verbatim: tuple[np.ndarray, np.ndarray] | None = None

    # Not functools.cached_property: in Python 3.11 its lock makes threads wait for each other.
    @property
    def _parts(self) -> list[memoryview]:
        """Return all sections except the ids."""
        if self._others is None:
            self._others = list(self._sections)
        return self._others

    @property
    def weight(self) -> EncodedRows:
        """Return the rows' weights, encoded."""
        if self._weight is None:
            self._weight = self._open_weight()
        return self._weight

    @property
    def states(self) -> dict[str, EncodedState]:
        """Return the rows' optimizer states, encoded, by name."""
        if self._states is None:
            self._states = self._open_states()
        return self._states

    def _open_weight(self) -> EncodedRows:
        header = self.header
        with self.refusing():
            exceptions, exact = _exceptions(header, self._parts[1] if header.exceptions else b"")
            return EncodedRows(
                codec=header.codec,
                parameters=header.parameters,
                data=_tensor(self._parts[0]),
                count=header.count,
                cols=header.cols,
                dtype=header.dtype,
                exceptions=exceptions,
                exact=exact,
            )

    def _open_states(self) -> dict[str, EncodedState]:
        header = self.header
        with self.refusing():
            parts = self._parts[2 if header.exceptions else 1 :]
            return {
                name: (LogState if name in header.log_states else EncodedState)(
                    parameters=header.state_encodings[name],
                    data=_tensor(part),
                    count=header.count,
                    cols=() if rowwise else (header.cols,),
                    dtype=dtype,
                ).checked()
                for (name, (dtype, rowwise)), part in zip(
                    header.optimizer.items(), parts, strict=True
                )
            }

    def select(self, chosen: np.ndarray) -> EncodedRows | None:
        """Return chosen rows' weights, still encoded; None if the codec can't separate rows."""
        with self.refusing():
            return self.weight.select(chosen)

    def add_to(self, references: References, chosen: slice) -> None:
        """Replace rows of references by chosen rows, which are decoded upon their predecessors
        there. Several threads may do so at once, each with a chunk of other rows.
        """
        header, codec = self.header, self.header.codec
        assert isinstance(codec, Chained)
        at = self.ids[chosen] - references.rectangle.row_start
        positions = np.arange(chosen.start, chosen.stop)
        with self.refusing():
            if not isinstance(references, codec.references):
                raise ValueError(f"codec {codec.name!r} upon rows of another codec")
            if references.states.keys() != header.log_states:
                raise ValueError(
                    f"optimizer state of {sorted(header.log_states)} is stored as differences, "
                    f"before it was {sorted(references.states)}"
                )
            before = references.gather(at) if header.is_link else None
            found = codec.apply(
                self.weight.data, header.parameters, header.count, before, positions, header.cols
            )
            known = {name: held.gather(at) for name, held in references.states.items()}
            codes = {name: self._log_state(name).codes(known[name], chosen) for name in known}
            references.scatter(at, found, before)
            for name, held in references.states.items():
                held.scatter(at, codes[name], known[name])

    def _log_state(self, name: str) -> LogState:
        state = self.states[name]
        assert isinstance(state, LogState)
        return state

    def verbatim(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows stored bit for bit; see ``codecs.chained.Chained.verbatim_rows``."""
        if self._verbatim is None:
            header, codec = self.header, self.header.codec
            assert isinstance(codec, Chained)
            with self.refusing():
                data, n, cols = self.weight.data, header.count, header.cols
                self._verbatim = codec.verbatim_rows(data, n, cols)
        return self._verbatim

    def state(self, name: str, chosen: Chosen) -> torch.Tensor:
        """Decode chosen rows of an optimizer state, on the CPU."""
        with self.refusing():
            return self.states[name].decode(chosen)

    def rows(self, chosen: Chosen | None = None) -> Rows:
        """Decode chosen rows, or all, on the CPU."""
        chosen = slice(0, self.header.count) if chosen is None else chosen
        states = {name: self.state(name, chosen) for name in self.states}
        return Rows(torch.from_numpy(self.ids[chosen]), self.values(chosen), states)

    def values(self, chosen: Chosen) -> torch.Tensor:
        """Decode chosen rows' weights, ``(n, cols)`` on the CPU."""
        n = len(self.ids[chosen])
        weight = torch.empty((n, self.header.cols), dtype=self.header.dtype, device="cpu")
        for start, block in self._decoded(self.weight, chosen):
            weight[start : start + len(block)] = block
        return weight

    def blocks(self, chosen: Chosen, states: Iterable[str] | None = None) -> Iterator[Rows]:
        """Decode chosen rows block by block; each block's weights reuse the same memory.

        Args:
            states: names of the optimizer states to decode as well; None: all.
        """
        ids = torch.from_numpy(self.ids[chosen])
        names = self.states if states is None else states
        optimizer = {name: self.state(name, chosen) for name in names}
        for start, weight in self._decoded(self.weight, chosen, CONVERTED_BYTES):
            here = slice(start, start + len(weight))
            yield Rows(ids[here], weight, {n: state[here] for n, state in optimizer.items()})

    def write(self, shard: LocalShard, chosen: Chosen, states: Iterable[str]) -> None:
        """Overwrite a shard's rows with chosen rows.

        Args:
            shard: has the columns of this chunk, and all chosen rows.
            states: names of the optimizer states to write as well.
        """
        local = self.ids[chosen] - shard.rectangle.row_start
        if not len(local):
            return
        where = as_range(local)
        self._write_weights(shard.weight, where, chosen)
        for name in states:
            self._write_state(name, shard.optimizer[name], where, chosen)

    def _write_weights(self, weight: torch.Tensor, where: Chosen, chosen: Chosen) -> None:
        with self.refusing():
            if _copied(self.weight, chosen, weight, where):
                return
            if self.weight.write(chosen, weight, where):
                return
        for start, block in self._decoded(self.weight, chosen):
            _put(weight, part_of(where, start, start + len(block)), block)

    def _write_state(self, name: str, memory: torch.Tensor, where: Chosen, chosen: Chosen) -> None:
        if not _copied(self.states[name], chosen, memory, where):
            _put(memory, where, self.state(name, chosen))

    def _decoded(
        self, encoded: EncodedRows, chosen: Chosen, most: int = BLOCK_BYTES
    ) -> Iterator[tuple[int, torch.Tensor]]:
        with self.refusing():
            yield from encoded.blocks(chosen, most)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn errors of what decodes the chunk into ``CorruptCheckpoint``."""
        try:
            yield
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            raise CorruptCheckpoint(
                f"a chunk of {self.header.count} rows of {self.header.table} can't be decoded: "
                f"{error}"
            ) from error


def as_range(positions: np.ndarray) -> Chosen:
    """Return positions, sorted and distinct, as a range if they follow each other."""
    if len(positions) and int(positions[-1]) - int(positions[0]) + 1 == len(positions):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions


def _copied(
    rows: EncodedRows | EncodedState, chosen: Chosen, memory: torch.Tensor, where: Chosen
) -> bool:
    """Copy chosen rows to rows of a tensor if stored as raw bytes of its dtype; return whether."""
    raw = rows.raw if memory.dtype == rows.dtype else None
    return raw is not None and try_copy_rows(raw, rows.count, chosen, memory, where)


def _put(memory: torch.Tensor, where: Chosen, rows: torch.Tensor) -> None:
    """Overwrite rows of a tensor of any device and dtype."""
    if isinstance(where, slice):
        memory[where].copy_(rows)
        return
    whole = slice(0, len(rows))
    if memory.dtype != rows.dtype or not try_copy_rows(rows, len(rows), whole, memory, where):
        memory.index_copy_(0, torch.from_numpy(where).to(memory.device), rows.to(memory))


def _exceptions(header: RowsHeader, data: bytes | memoryview) -> tuple[np.ndarray, torch.Tensor]:
    """Decode the sorted positions of the rows stored exactly, and these rows."""
    count, cols = header.exceptions, header.cols
    if not count:
        return _NONE, torch.empty((0, cols), dtype=header.dtype, device="cpu")
    size = count * (4 + cols * header.dtype.itemsize)
    if len(data) != size:
        raise ValueError(f"{count} exact rows take {size} bytes, not {len(data)}")
    positions = np.frombuffer(data, "<u4", count).astype(np.int64)
    if count and (positions[-1] >= header.count or not bool((np.diff(positions) > 0).all())):
        raise ValueError("positions of exact rows are out of order or out of range")
    values = bytearray(memoryview(data)[4 * count :])  # a copy, as tensors must be aligned
    return positions, _tensor(memoryview(values)).view(header.dtype).view(count, cols)


def _tensor(data: memoryview) -> torch.Tensor:
    """Wrap bytes as a uint8 tensor; read-only bytes are copied."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
