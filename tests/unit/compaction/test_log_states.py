"""Optimizer state as logarithmic differences through random chains, beside a plain reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta.test_log_levels import FLOATS, code_of
from torchrec_checknrun.codecs import Delta
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.compaction.row_pieces import Piece, chunks_of
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.log_levels import values_of
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.row_chunk import encode_rows, rows_header
from torchrec_checknrun.format.row_reader import StoredRows
from torchrec_checknrun.restore.links import newest_codes
from torchrec_checknrun.save.links import _Recorder
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape

FIRST, ROWS, DIM = 7, 12, 2
PLACE = Rectangle(FIRST, FIRST + ROWS, 0, DIM)
STATES = ("momentum1", "row_counter")
Sums = dict[int, tuple[float, ...]]
"""The states of rows by position."""


def references() -> GridReferences:
    return GridReferences("t", PLACE, STATES)


@dataclass
class Chain:
    """The checkpoints that a job writes, and the values that its rows must restore to, by plain
    Python.
    """

    held: GridReferences = field(default_factory=references)
    chunks: list[EncodedChunk] = field(default_factory=list)
    codes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def save(self, sums: Sums, base: bool, compress: bool, fails: bool = False) -> None:
        """Write some rows in two chunks, as a base or a link; undo a link that fails."""
        changes = Transaction([self.held], base)
        digest = self.held.digest
        codec = Delta(step=2.0**-10).upon(_Recorder(changes, self.held))
        encoding, positions = TableEncoding(codec, "logdelta", compress), sorted(sums)
        half = len(positions) // 2
        written = [
            encode_rows(block_of({at: sums[at] for at in part}), encoding)
            for part in (positions[:half], positions[half:])
            if part
        ]
        if fails:
            changes.undo()
            assert self.held.digest == digest
            return
        changes.keep()
        self.chunks = written if base else [*self.chunks, *written]
        self.codes |= {at: tuple(map(code_of, values)) for at, values in sums.items()}

    def compact(self) -> None:
        """Replace the chain by a copy that stands alone."""
        built, done, pieces = self.built(), set[int](), []
        for chunk in reversed(self.chunks):
            stored = opened(chunk)
            new = np.flatnonzero([id not in done for id in stored.ids.tolist()])
            done.update(stored.ids.tolist())
            if len(new):
                pieces.append(Piece.of(stored, new, built))
        self.chunks = list(chunks_of(pieces))

    def built(self) -> GridReferences:
        """Read the chain's chunks in order."""
        found = references()
        for chunk in self.chunks:
            stored = opened(chunk)
            stored.add_to(found, slice(0, stored.header.count))
        return found

    def check(self) -> None:
        """Compare what is read, and what the job keeps, with the plain reference."""
        built = self.built()
        assert built.digest == self.held.digest
        for chunk in self.chunks:
            stored = opened(chunk)
            every = slice(0, stored.header.count)
            for number, name in enumerate(STATES):
                codes = newest_codes(built, stored, name, every)
                wanted = [self.codes[id - FIRST][number] for id in stored.ids.tolist()]
                assert codes.tolist() == wanted
                assert np.array_equal(codes, newest_codes(self.held, stored, name, every))
                if not stored.header.is_link and len(self.chunks) == 1:
                    alone = stored.state(name, every)
                    assert torch.equal(alone.nan_to_num(7), values_of(codes).nan_to_num(7))


def block_of(sums: Sums) -> RowBlock:
    ids = torch.tensor([at + FIRST for at in sums])
    states = {
        name: torch.tensor([values[number] for values in sums.values()])
        for number, name in enumerate(STATES)
    }
    weight = torch.arange(len(sums) * DIM).view(-1, DIM) / 8
    shape = TableShape(FIRST + ROWS, DIM)
    return RowBlock("t", shape, (0, DIM), ids, weight, None, states)


def opened(chunk: EncodedChunk) -> StoredRows:
    entry = chunk.entry
    return StoredRows(rows_header(entry), memoryview(bytearray(chunk.getvalue())))  # type: ignore[arg-type]  # of rows


GROWING = st.floats(1.0, 1.5).map(lambda factor: ("times", factor))
VALUES = st.one_of(GROWING, GROWING, FLOATS.map(lambda value: ("is", value)))
WAYS = st.sampled_from(["link", "link", "link", "failed link", "base", "compact"])


@pytest.mark.usefixtures("small_operations")
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_random_chains_restore_the_same_codes(data: st.DataObject) -> None:
    """Sums grow, are reset, evicted to zero, NaN, huge or denormal, beside failed saves."""
    chain = Chain()
    sums: Sums = dict.fromkeys(range(ROWS), (0.0, 1e-3))
    chain.save(sums, base=True, compress=data.draw(st.booleans()))
    chain.check()
    for way in data.draw(st.lists(WAYS, max_size=8)):
        if way == "compact":
            chain.compact()
            chain.check()
            continue
        changed = sorted(data.draw(st.sets(st.integers(0, ROWS - 1), min_size=1)))
        for at in changed:
            draws = data.draw(st.tuples(VALUES, VALUES))
            sums[at] = tuple(grown(old, *draw) for old, draw in zip(sums[at], draws, strict=True))
        some = sums if way == "base" else {at: sums[at] for at in changed}
        fails = way == "failed link"
        chain.save(some, base=way == "base", compress=data.draw(st.booleans()), fails=fails)
        chain.check()


def grown(old: float, how: str, value: float) -> float:
    new = old * value if how == "times" else value
    return new if math.isnan(new) or abs(new) <= 3.4e38 else math.inf
