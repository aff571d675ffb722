"""Check rows of LC-Checkpoint upon references: links replayed, undone, joined, and hostile ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta.lc.test_buckets import plainly, weights
from tests.unit.delta.plain import same_rows
from torchrec_checknrun.codecs import LcCheckpoint, RowContext
from torchrec_checknrun.delta.digest import row_digests, total
from torchrec_checknrun.delta.grid import Grid, Kind
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.references import Upon
from torchrec_checknrun.delta.rows import values_of
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.shards import Rectangle

SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ROWS, FIRST, DIM = 30, 1000, 5
EVERY = np.arange(ROWS)


T = TypeVar("T")


class Recorder:
    """Encodes rows within a transaction, as a save does."""

    def __init__(self, references: ValueReferences, base: bool) -> None:
        self.references = references
        self.changes = Transaction([references], base)

    @property
    def base(self) -> bool:
        return self.changes.base

    def encode(self, ids: torch.Tensor, upon: Upon[T]) -> T:
        return self.changes.encode(self.references, ids, upon)


def make() -> ValueReferences:
    return ValueReferences("t", Rectangle(FIRST, FIRST + ROWS, 2, 2 + DIM))


def digest_of(references: ValueReferences) -> int:
    rows = references.gather(np.arange(references.rectangle.rows))
    ids = np.arange(len(rows)) + references.rectangle.row_start
    return total(row_digests(ids, references.columns, rows))


def drawn(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw rows, some of them not finite."""
    rng, rows = np.random.default_rng(seed), weights(seed, (count, DIM), 1.0)
    for value in (math.nan, math.inf, -3e38):
        rows[torch.from_numpy(rng.random((count, DIM)) < 0.02)] = value
    return rows.to(dtype)


def bits_of(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS, DTYPES, st.sampled_from([2, 3, 4]), st.lists(st.booleans(), max_size=8))
def test_links_replayed_give_the_writers_rows(
    seed: int, dtype: torch.dtype, bits: int, kept: list[bool]
) -> None:
    """Read base and committed links as a restore does; what was undone leaves no trace."""
    rng, writer, reader = np.random.default_rng(seed), make(), make()
    codec = LcCheckpoint(bits)
    for number, keep in enumerate([True, *kept]):
        at = np.flatnonzero(rng.random(ROWS) < 0.5) if number else EVERY
        recorder = Recorder(writer, base=number == 0)
        weight = drawn(seed + number, len(at), dtype)
        ids = torch.from_numpy(at + FIRST)
        known = writer.gather(EVERY)
        encoded = codec.upon(recorder).encode(weight, None, RowContext({}, ids))
        assert codec.needs_base(encoded.parameters) == (number > 0)
        if not keep:
            recorder.changes.undo()
            assert same_rows(writer.gather(EVERY), known)
            continue
        recorder.changes.keep()
        assert encoded.restored is not None
        some = np.arange(0, len(at), 2)  # another rank's share, then the rest
        for chosen in (some, np.setdiff1d(np.arange(len(at)), some)):
            before = reader.gather(at[chosen]) if number else None
            found = codec.apply(encoded.data, encoded.parameters, len(at), before, chosen, DIM)
            restored = encoded.restored(torch.from_numpy(chosen))
            assert bits_of(values_of(found, dtype)) == bits_of(restored)
            finite = torch.isfinite(weight[torch.from_numpy(chosen)])
            assert torch.isfinite(restored[finite]).all()
            reader.scatter(at[chosen], found)
        assert same_rows(reader.gather(EVERY), writer.gather(EVERY))
        assert reader.digest == writer.digest == digest_of(writer)


@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, st.sampled_from([2, 3, 4]))
def test_a_link_of_rows_is_the_papers(seed: int, bits: int) -> None:
    writer, codec = make(), LcCheckpoint(bits)
    base, now = weights(seed, (ROWS, DIM), 1.0), weights(seed + 1, (ROWS, DIM), 1.0)
    for number, weight in enumerate((base, now)):
        recorder = Recorder(writer, base=number == 0)
        context = RowContext({}, torch.from_numpy(EVERY + FIRST))
        codec.upon(recorder).encode(weight, None, context)
        recorder.changes.keep()
    found = values_of(writer.gather(EVERY), torch.float32)
    assert found.view(-1).tolist() == plainly(now, base, bits)


@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, DTYPES, DTYPES, st.integers(1, ROWS - 1))
def test_rows_alone_are_taken_out_and_joined(
    seed: int, kept: torch.dtype, dtype: torch.dtype, cut: int
) -> None:
    """Values of a narrow type take no more bytes; others of such a table are kept in fp32."""
    codec, rows = LcCheckpoint(2), drawn(seed, ROWS, kept).float()
    grid = Grid(np.full(ROWS, Kind.VERBATIM, np.uint8), np.zeros(ROWS, np.int16),
                rows.view(torch.int32).numpy())  # fmt: skip
    data, parameters = codec.alone(grid, dtype)
    narrow = bits_of(rows.to(dtype).float()) == bits_of(rows) and not rows.isnan().any()
    assert len(data) == ROWS * DIM * (dtype.itemsize if narrow else 4)
    parts, places = [], [torch.arange(0, cut), torch.arange(cut, ROWS)]
    for place in places:
        part = codec.select(data, parameters, ROWS, DIM, place)
        assert part is not None
        assert codec.family(part[1], DIM) == codec.family(parameters, DIM) is not None
        parts.append((*part, len(place)))
    joined, joined_parameters = codec.join(parts, places, DIM)
    assert torch.equal(joined, data)
    found = codec.apply(joined, joined_parameters, ROWS, None, EVERY, DIM)
    assert same_rows(found, grid)


@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, st.integers(0, ROWS - 2), st.integers(1, ROWS))
def test_a_part_of_references(seed: int, start: int, count: int) -> None:
    references, rng = make(), np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(ROWS) < 0.8)
    rows = drawn(seed, len(at), torch.float32)
    grid = Grid(np.full(len(at), Kind.VERBATIM, np.uint8), np.zeros(len(at), np.int16),
                rows.view(torch.int32).numpy())  # fmt: skip
    references.scatter(at, grid)
    stop = min(ROWS, start + count)
    part = references.part(Rectangle(FIRST + start, FIRST + stop, 2, 2 + DIM))
    assert same_rows(part.gather(np.arange(stop - start)), references.gather(EVERY[start:stop]))
    assert part.digest == digest_of(part)
    assert references.bytes == ValueReferences.expected_bytes(references.rectangle)
    references.clear()
    assert references.digest == digest_of(references) == 0


def link(bits: int = 3) -> tuple[torch.Tensor, dict[str, Any], Grid]:
    """Encode a link; return its data, parameters and predecessors."""
    writer, codec = make(), LcCheckpoint(bits)
    for number in range(2):
        before = writer.gather(EVERY)
        recorder = Recorder(writer, base=number == 0)
        context = RowContext({}, torch.from_numpy(EVERY + FIRST))
        rows = weights(number, (ROWS, DIM), 1.0)
        encoded = codec.upon(recorder).encode(rows, None, context)
        recorder.changes.keep()
    return encoded.data, encoded.parameters, before


def on_grids(before: Grid) -> Grid:
    return Grid(np.full(len(before), Kind.GRID, np.uint8), before.exponent, before.codes)


def test_what_no_encoder_writes_is_refused() -> None:
    data, parameters, before = link()
    none = Grid.none(ROWS, DIM)
    act = partial(LcCheckpoint(3).apply, rows=ROWS, chosen=EVERY, dim=DIM)
    for changed, words in (
        ({"before": None}, "without predecessors"),
        ({"before": none}, "other predecessors"),
        ({"before": on_grids(before)}, "on grids"),
        ({"parameters": {}}, "rows of 5 values of torch.float32 take"),
        ({"parameters": {"values": "fp64"}}, "fp64"),
        ({"parameters": {"values": ["fp32"]}}, "values of type"),
        ({"rows": ROWS + 1}, "take other bytes|cut off|longer or shorter"),
        ({"data": data[:0]}, "other than 3 bits"),
        ({"data": data[:-1]}, "take other bytes"),
    ):
        given: dict[str, Any] = {"data": data, "parameters": parameters, "before": before}
        given |= changed
        with pytest.raises(ValueError, match=words):
            act(**given)
    with pytest.raises(ValueError, match="other than 2 bits"):
        LcCheckpoint(2).apply(data, parameters, ROWS, before, EVERY, DIM)
    with pytest.raises(ValueError, match="on grids"):
        make().scatter(EVERY, on_grids(before))
    with pytest.raises(ValueError, match="without predecessors"):
        LcCheckpoint(3).decode(data, parameters, ROWS, 0, torch.empty(2, DIM))
    for bits in (1, 5, True, "2", 2.0, None):
        with pytest.raises(ValueError, match="one of"):
            LcCheckpoint(bits)  # type: ignore[arg-type]  # specs are untrusted


def test_denormals_count_though_training_flushes_them() -> None:
    """A thread that takes denormals for zero writes what others read."""
    before = torch.full((8, 4), 2.0**-126)
    weight = before - 2.0**-127
    payloads = []
    for flush in (False, True):
        writer = ValueReferences("t", Rectangle(FIRST, FIRST + 8, 0, 4))
        if flush and not torch.set_flush_denormal(True):
            pytest.skip("this processor has no mode that takes denormals for zero")
        try:
            for number, rows in enumerate((before, weight)):
                recorder = Recorder(writer, base=number == 0)
                context = RowContext({}, torch.arange(8) + FIRST)
                encoded = LcCheckpoint(2).upon(recorder).encode(rows, None, context)
                recorder.changes.keep()
            assert (torch.full((1,), 2.0**-126) / 2 == 0).item() == flush
        finally:
            torch.set_flush_denormal(False)
        payloads.append((bits_of(encoded.data), writer.digest))
    assert payloads[0] == payloads[1]
    assert bits_of(values_of(writer.gather(np.arange(8)), torch.float32)) == bits_of(weight)
