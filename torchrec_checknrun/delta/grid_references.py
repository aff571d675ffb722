"""Keep in memory what a shard's rows restore to as integers: the predecessors of the next link.

A row takes a byte for each code and two more. Rows with codes beyond a byte lie in memory beside,
as 16 or 32 bits a code; of a row stored bit for bit only the digest is kept, since nothing builds
on such a row. So the predecessors of fp32 tables take little more than a quarter of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from torchrec_checknrun.bitwidth import LEAST_SLOT_BYTES, delta_reference_bytes
from torchrec_checknrun.delta import kernel
from torchrec_checknrun.delta.digest import row_digests, total
from torchrec_checknrun.delta.references import BLOCK_ROWS, References, Undo
from torchrec_checknrun.delta.rows import Grid, Kind
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shards import Rectangle

_BIAS = 150
"""Added to exponents, which then fit into a byte."""


class _Form(IntEnum):
    """The form in which a row is kept."""

    NONE = 0
    BYTES = 1
    SHORT = 2
    LONG = 3
    DIGEST = 4


_TYPES: dict[_Form, type[np.int16] | type[np.int32]] = {
    _Form.SHORT: np.int16,
    _Form.LONG: np.int32,
}


@dataclass
class Record:
    """Some rows of references as they were, to be put back.

    Attributes:
        positions: ``(n,)`` int64.
        forms, exponents: ``(n,)`` uint8, as kept.
        slots: ``(n, bytes)`` uint8, as kept; without meaning for rows that lie beside.
        beside: the rows' codes, by form.
    """

    positions: np.ndarray
    forms: np.ndarray
    exponents: np.ndarray
    slots: np.ndarray
    beside: dict[_Form, np.ndarray]


class GridReferences(References):
    """The integers that the rows of one shard restore to; see ``References``."""

    keeps_bits: ClassVar[bool] = False

    def __init__(self, table: str, rectangle: Rectangle, states: Iterable[str] = ()) -> None:
        super().__init__(table, rectangle, states)
        n, cols = rectangle.rows, rectangle.cols
        self._forms = np.zeros(n, np.uint8)
        self._exponents = np.zeros(n, np.uint8)
        self._slots = np.zeros((n, max(LEAST_SLOT_BYTES, cols)), np.uint8)
        self._beside = {form: _Beside(cols, dtype) for form, dtype in _TYPES.items()}

    @staticmethod
    def expected_bytes(rectangle: Rectangle, states: int = 0) -> int:
        return rectangle.rows * delta_reference_bytes(rectangle.cols, states)

    @property
    def bytes(self) -> int:
        beside = sum(rows.bytes for rows in self._beside.values())
        own = self._forms.nbytes + self._exponents.nbytes + self._slots.nbytes
        return super().bytes + own + beside

    def clear(self) -> None:
        super().clear()
        self._forms[:] = _Form.NONE
        for rows in self._beside.values():
            rows.clear()

    def gather(self, positions: np.ndarray) -> Grid:
        if has_extension():
            found = Grid.empty(len(positions), self.rectangle.cols)
            beside = torch.ops.checknrun.delta_gather(
                torch.from_numpy(positions), *self._tensors, *_tensors_of(found)
            )
        else:
            found, beside = self._gather(positions), True
        if beside:
            forms = self._forms[positions]
            for form, rows in self._beside.items():
                here = forms == form
                if here.any():
                    found.codes[here] = rows.at(self._places(positions[here]))
        return found

    def _gather(self, positions: np.ndarray) -> Grid:
        """Return rows, but the codes of those that lie beside."""
        forms = self._forms[positions]
        found = Grid.none(len(positions), self.rectangle.cols)
        near = forms == _Form.BYTES
        found.codes[near] = self._slots[positions[near], : self.rectangle.cols].view(np.int8)
        on_grid = (forms != _Form.NONE) & (forms != _Form.DIGEST)
        found.kind[on_grid] = Kind.GRID
        found.kind[forms == _Form.DIGEST] = Kind.VERBATIM
        exponents = self._exponents[positions].astype(np.int16) - _BIAS
        found.exponent[on_grid] = exponents[on_grid]
        return found

    def scatter(self, positions: np.ndarray, rows: Grid, before: Grid | None = None) -> None:
        forms = self._forms[positions]
        # Of a base no row has a predecessor.
        gone = total(self.digests(positions, before)) if forms.any() else 0
        left = {form: self._places(positions[forms == form]) for form in self._beside}
        digests = row_digests(positions + self.rectangle.row_start, self.columns, rows)
        if has_extension():
            beside = torch.ops.checknrun.delta_scatter(
                torch.from_numpy(positions),
                *_tensors_of(rows),
                torch.from_numpy(digests.view(np.int64)),
                *self._tensors,
            )
        else:
            self._scatter(positions, rows, digests)
            beside = True
        if beside:
            forms = self._forms[positions]
        with self._lock:
            for form, held in self._beside.items():
                held.release(left[form])
                here = forms == form
                if beside and here.any():
                    self._set_words(positions[here], held.add(rows.codes[here]))
            self._count(gone, total(digests))

    def _scatter(self, positions: np.ndarray, rows: Grid, digests: np.ndarray) -> None:
        """Replace rows, but the codes of those that are to lie beside."""
        forms = _forms_of(rows.codes)
        forms[rows.kind == Kind.VERBATIM] = _Form.DIGEST
        forms[rows.kind == Kind.NONE] = _Form.NONE
        self._forms[positions] = forms
        self._exponents[positions] = np.where(rows.kind == Kind.GRID, rows.exponent + _BIAS, 0)
        near, exact = forms == _Form.BYTES, forms == _Form.DIGEST
        codes = rows.codes[near].astype(np.int8).view(np.uint8)
        self._slots[positions[near], : self.rectangle.cols] = codes
        self._set_words(positions[exact], digests[exact])

    def link(
        self,
        positions: np.ndarray,
        weight: torch.Tensor,
        wanted: np.ndarray,
        reset: int,
        note: Callable[[Record], object],
    ) -> tuple[np.ndarray, list[int]]:
        """Encode rows upon those kept here, and keep the new ones, by the compiled operation.

        Args:
            positions: ``(n,)`` int64, sorted and distinct.
            weight: ``(n, cols)`` on the CPU, each row in one piece.
            wanted: ``(n,)`` int16 exponents.
            reset: powers of two by which a step may not grow; beyond, a row stands alone.
            note: receives the rows as they were, as soon as they are changed.

        Returns:
            Streams and their sizes, as ``kernel.encode_rows`` does.

        Raises:
            ValueError: rows kept here are not sound; nothing was changed.
        """
        n, beside = len(positions), [rows.all for rows in self._beside.values()]
        old = Record(
            positions,
            np.empty(n, np.uint8),
            np.empty(n, np.uint8),
            np.empty((n, self._slots.shape[1]), np.uint8),
            {},
        )
        data, sizes, *rest = torch.ops.checknrun.delta_link(
            torch.from_numpy(positions),
            weight,
            torch.from_numpy(wanted),
            reset,
            self.rectangle.row_start,
            *self.columns,
            *self._tensors,
            *map(torch.from_numpy, (*beside, old.forms, old.exponents, old.slots)),
            kernel.BUILD,
        )
        shorts, longs, *freed, moved, codes = (tensor.numpy() for tensor in rest[:-2])
        old.beside = {_Form.SHORT: shorts, _Form.LONG: longs}
        note(old)
        for rows, places in zip(self._beside.values(), freed, strict=True):
            rows.release(places)
        forms = _forms_of(codes)
        for form, rows in self._beside.items():
            here = positions[moved[forms == form]]
            if len(here):
                self._set_words(here, rows.add(codes[forms == form]))
                self._forms[here] = form
        self._count(*rest[-2:])
        return data.numpy(), sizes

    @property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the forms, exponents and slots as the compiled operations take them."""
        forms, exponents = torch.from_numpy(self._forms), torch.from_numpy(self._exponents)
        return forms, exponents, torch.from_numpy(self._slots)

    def digests(self, positions: np.ndarray, known: Grid | None = None) -> np.ndarray:
        """Return rows' digests by position, ``(n,)`` uint64.

        Args:
            known: the rows as ``gather`` returns them, if they are at hand.
        """
        rows = self.gather(positions) if known is None else known
        found = row_digests(positions + self.rectangle.row_start, self.columns, rows)
        exact = rows.kind == Kind.VERBATIM
        found[exact] = self._words(positions[exact])
        return found

    def record(self, positions: np.ndarray) -> Record:
        """Copy rows, to be put back."""
        forms = self._forms[positions]
        beside = {
            form: rows.at(self._places(positions[forms == form]))
            for form, rows in self._beside.items()
        }
        slots = self._slots[positions]
        return Record(positions, forms, self._exponents[positions], slots, beside)

    def put_back(self, record: Record) -> None:
        """Replace rows by recorded ones; the caller sees to the digest."""
        positions = record.positions
        self._release(positions)
        self._forms[positions] = record.forms
        self._exponents[positions] = record.exponents
        self._slots[positions] = record.slots
        for form, codes in record.beside.items():
            here = record.forms == form
            if here.any():
                self._set_words(positions[here], self._beside[form].add(codes))

    def undo(self, positions: np.ndarray) -> Undo:
        return partial(self.put_back, self.record(positions))

    def part(self, rectangle: Rectangle) -> GridReferences:
        if rectangle == self.rectangle:
            return self
        start = rectangle.row_start - self.rectangle.row_start
        found = GridReferences(self.table, rectangle, self.states)
        for at in range(0, rectangle.rows, BLOCK_ROWS):
            here = np.arange(at, min(at + BLOCK_ROWS, rectangle.rows))
            record = self.record(here + start)
            found._count(0, total(self.digests(record.positions)))
            record.positions = here
            found.put_back(record)
        found._take_states(self)
        return found

    def _release(self, positions: np.ndarray) -> None:
        """Give up what rows take beside."""
        forms = self._forms[positions]
        for form, rows in self._beside.items():
            here = forms == form
            if here.any():
                rows.release(self._places(positions[here]))

    def _places(self, positions: np.ndarray) -> np.ndarray:
        """Return where rows lie beside."""
        return self._words(positions).astype(np.int64)

    def _words(self, positions: np.ndarray) -> np.ndarray:
        """Return the 64 bits at the start of rows' slots, ``(n,)`` uint64."""
        words = np.ascontiguousarray(self._slots[positions, :LEAST_SLOT_BYTES])
        found: np.ndarray = words.view(np.uint64)[:, 0]
        return found

    def _set_words(self, positions: np.ndarray, words: np.ndarray) -> None:
        wide = np.ascontiguousarray(words).astype(np.uint64).view(np.uint8)
        self._slots[positions, :LEAST_SLOT_BYTES] = wide.reshape(-1, LEAST_SLOT_BYTES)


def _forms_of(codes: np.ndarray) -> np.ndarray:
    """Return the forms of rows on grids, by their codes."""
    largest = np.abs(codes.astype(np.int64)).max(axis=1, initial=0)
    forms = np.full(len(codes), _Form.BYTES, np.uint8)
    forms[largest > np.iinfo(np.int8).max] = _Form.SHORT
    forms[largest > np.iinfo(np.int16).max] = _Form.LONG
    return forms


def _tensors_of(rows: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return kinds, exponents and codes as the compiled operations take them."""
    kind, exponent = np.ascontiguousarray(rows.kind), np.ascontiguousarray(rows.exponent)
    codes = torch.from_numpy(np.ascontiguousarray(rows.codes))
    return torch.from_numpy(kind), torch.from_numpy(exponent), codes


class _Beside:
    """Rows of wider codes, at places of their own."""

    def __init__(self, cols: int, dtype: type[np.int16 | np.int32]) -> None:
        self._rows = np.empty((0, cols), dtype)
        self._used = 0
        self._free: list[np.ndarray] = []

    @property
    def bytes(self) -> int:
        return self._rows.nbytes

    @property
    def all(self) -> np.ndarray:
        """Return all rows by place, free places included."""
        return self._rows

    def at(self, places: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._rows[places]
        return found

    def add(self, codes: np.ndarray) -> np.ndarray:
        """Add rows; return their places."""
        places = [np.empty(0, np.int64)]
        wanted = len(codes)
        while wanted and self._free:
            free = self._free.pop()
            places.append(free[:wanted])
            if len(free) > wanted:
                self._free.append(free[wanted:])
            wanted -= len(places[-1])
        if self._used + wanted > len(self._rows):
            grown = max(self._used + wanted, len(self._rows) + len(self._rows) // 4)
            rows = np.empty((grown, self._rows.shape[1]), self._rows.dtype)
            rows[: self._used] = self._rows[: self._used]
            self._rows = rows
        places.append(np.arange(self._used, self._used + wanted))
        self._used += wanted
        found = np.concatenate(places)
        self._rows[found] = codes
        return found

    def release(self, places: np.ndarray) -> None:
        """Free places."""
        if len(places):
            self._free.append(places)

    def clear(self) -> None:
        """Free all places."""
        self._used, self._free = 0, []
