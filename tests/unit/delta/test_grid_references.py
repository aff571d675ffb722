"""Keep rows as they were put, in whatever form, and undo to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.delta.plain import same_rows
from tests.unit.delta.test_rows import put, random_rows, random_steps, rows_at
from torchrec_checknrun.delta import digest, kernel, link
from torchrec_checknrun.delta import grid_references as references_module
from torchrec_checknrun.delta.digest import WORD, row_digests, total
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.link import encode_upon
from torchrec_checknrun.delta.rows import Grid, Kind, encode
from torchrec_checknrun.delta.transaction import Transaction
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shards import Rectangle

pytestmark = pytest.mark.usefixtures("small_operations", "each_twin")


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def each_twin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests with the compiled operations, then with NumPy in their place."""
    if request.param == "compiled":
        if not has_extension():
            pytest.skip("the compiled operations were not built: there was no C++ compiler")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (digest, references_module, link, kernel):
            patch.setattr(module, "has_extension", lambda: False)
        yield


FIRST, COLUMNS = 1000, (4, 9)


def make(rows: int) -> GridReferences:
    return GridReferences("t", Rectangle(FIRST, FIRST + rows, *COLUMNS))


def known(rows: Grid) -> Grid:
    """Return rows as references give them: without the codes of rows stored bit for bit."""
    found = rows_at(rows, np.arange(len(rows)))
    found.codes[found.kind == Kind.VERBATIM] = 0
    return found


def random_grid(rng: np.random.Generator, n: int) -> Grid:
    weight = random_rows(rng, n, COLUMNS[1] - COLUMNS[0], torch.float32, 1.0)
    _, rows = encode(weight, random_steps(rng, n))
    none = rng.random(n) < 0.1
    rows.kind[none], rows.exponent[none], rows.codes[none] = Kind.NONE, 0, 0
    return rows


def digest_of(rows: Grid) -> int:
    return total(row_digests(np.arange(len(rows)) + FIRST, COLUMNS, rows))


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), rounds=st.integers(1, 8))
def test_rows_come_back_and_the_digest_follows(seed: int, rows: int, rounds: int) -> None:
    rng, references = np.random.default_rng(seed), make(rows)
    wanted = Grid.none(rows, COLUMNS[1] - COLUMNS[0])
    for _ in range(rounds):
        chosen = np.flatnonzero(rng.random(rows) < 0.6)
        new = random_grid(rng, len(chosen))
        record, known_digest = references.record(chosen), references.digest
        references.scatter(chosen, new)
        if rng.random() < 0.4:  # and back
            references.put_back(record)
            references.weights_digest = known_digest
        else:
            put(wanted, chosen, new)
        assert same_rows(references.gather(np.arange(rows)), known(wanted))
        assert references.digest == digest_of(wanted)
        assert total(references.digests(np.arange(rows))) == digest_of(wanted)
    start = int(rng.integers(0, rows))
    part = references.part(Rectangle(FIRST + start, FIRST + rows, *COLUMNS))
    here = rows_at(wanted, np.arange(start, rows))
    assert same_rows(part.gather(np.arange(rows - start)), known(here))
    rest = total(row_digests(np.arange(start) + FIRST, COLUMNS, rows_at(wanted, np.arange(start))))
    assert (part.digest + rest) % WORD == references.digest
    references.clear()
    assert references.digest == 0
    assert not references.gather(np.arange(rows)).kind.any()


@pytest.mark.parametrize("what", ["id", "columns", "kind", "exponent", "code"])
def test_digests_tell_rows_apart(what: str) -> None:
    rows = Grid(np.array([1], np.uint8), np.array([-5], np.int16), np.array([[7, 0]], np.int32))
    before = row_digests(np.array([3]), (0, 2), rows)
    ids, columns = np.array([4 if what == "id" else 3]), (0, 2) if what != "columns" else (2, 4)
    rows.kind[0] = Kind.VERBATIM if what == "kind" else Kind.GRID
    rows.exponent[0] -= what == "exponent"
    rows.codes[0, 1] += what == "code"
    assert row_digests(ids, columns, rows)[0] != before[0]


def test_both_twins_digest_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows, ids = random_grid(rng, 500), np.sort(rng.choice(1 << 40, 500, replace=False))
    one = row_digests(ids, COLUMNS, rows)
    monkeypatch.setattr(digest, "has_extension", lambda: False)
    assert np.array_equal(row_digests(ids, COLUMNS, rows), one)


def test_positions_out_of_range_are_refused() -> None:
    references = make(3)
    with pytest.raises(IndexError):
        references.gather(np.array([3]))


def test_memory_is_a_byte_a_code_and_two_a_row() -> None:
    rows, cols = 10_000, 64
    references = GridReferences("t", Rectangle(0, rows, 0, cols))
    weight = torch.randn(rows, cols)
    _, grid = encode(weight, np.full(rows, -4, np.int16))
    references.scatter(np.arange(rows), grid)
    assert references.bytes == rows * (cols + 2)
    assert references.bytes <= GridReferences.expected_bytes(references.rectangle)
    references.scatter(np.arange(100), encode(weight[:100], np.full(100, -10, np.int16))[1])
    assert references.bytes == rows * (cols + 2) + 100 * cols * 2


def encoded(
    changes: Transaction, references: GridReferences, seed: int, rows: int
) -> tuple[np.ndarray, Grid]:
    rng = np.random.default_rng(seed)
    chosen = np.flatnonzero(rng.random(rows) < 0.5)
    weight = random_rows(rng, len(chosen), COLUMNS[1] - COLUMNS[0], torch.float32, 1.0)
    ids = torch.from_numpy(chosen + FIRST)
    steps = random_steps(rng, len(chosen))
    encode = partial(encode_upon, weight=weight, wanted=steps)
    _, after = changes.encode(references, ids, encode)
    return chosen, after(np.arange(len(chosen)))


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kept=st.lists(st.booleans(), max_size=8))
def test_what_is_not_committed_is_undone(seed: int, kept: list[bool]) -> None:
    rows, references = 30, make(30)
    base = Transaction([references], base=True)
    wanted = Grid.none(rows, COLUMNS[1] - COLUMNS[0])
    put(wanted, *encoded(base, references, seed, rows))
    base.keep()
    for number, keep in enumerate(kept):
        changes = Transaction([references], base=False)
        parts = [
            encoded(changes, references, seed + 100 * number + part, rows) for part in range(2)
        ]
        before, after = changes.digests()["t"]
        assert (before, after) == (digest_of(wanted), references.digest)
        if keep:
            changes.keep()
            for part in parts:
                put(wanted, *part)
        else:
            changes.undo()
            changes.undo()
            with pytest.raises(SaveFailed):
                encoded(changes, references, seed, rows)
        assert same_rows(references.gather(np.arange(rows)), known(wanted))
        assert references.digest == digest_of(wanted)


def test_a_row_whose_state_was_reset_stands_alone() -> None:
    references = GridReferences("t", Rectangle(0, 1, 0, 2))
    base = Transaction([references], base=True)
    ids = torch.tensor([0])
    encode = partial(encode_upon, weight=torch.tensor([[0.5, 0.25]]))
    base.encode(references, ids, partial(encode, wanted=np.array([-12], np.int16)))
    base.keep()
    changes = Transaction([references], base=False)
    _, after = changes.encode(references, ids, partial(encode, wanted=np.array([-4], np.int16)))
    assert after(np.arange(1)).exponent.tolist() == [-4]
