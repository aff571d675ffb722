"""Share one budget over all tables, and spend the bits on the important rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun import Quantization
from torchrec_checknrun.codecs import ImportanceWeighted, RowContext, Surveys, settle
from torchrec_checknrun.codecs.budget import ImportanceSurvey
from torchrec_checknrun.row_sets import RowSet
from torchrec_checknrun.save.plan import survey
from torchrec_checknrun.shards import LocalShard, Rectangle, TableShape
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot

pytestmark = pytest.mark.usefixtures("either_kernel")

SEEDS = st.integers(0, 2**32 - 1)


def shard(
    table: str,
    rows: int,
    dim: int,
    importance: float,
    seed: int = 0,
    modified: int | None = None,
    state: bool = True,
) -> ShardSnapshot:
    """Make rows with sums around ``2**importance``, the first ``modified`` of them modified."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, dim, generator=generator) * 0.1
    sums = torch.exp2(importance + 4 * torch.randn(rows, generator=generator))
    marks = None
    if modified is not None:
        marks = RowSet(torch.arange(rows) < modified)
    local = LocalShard(
        table,
        TableShape(rows, dim),
        Rectangle(0, rows, 0, dim),
        weight,
        {"momentum1": sums} if state else {},
    )
    return ShardSnapshot(local, marks)


def widths(snapshot: ShardSnapshot, codec: ImportanceWeighted) -> np.ndarray:
    """Return the width in bits of each row to write."""
    local = snapshot.shard
    ids = snapshot.positions(0, local.rectangle.rows)
    context = RowContext({"momentum1": local.optimizer["momentum1"][ids]})
    encoded = codec.encode(local.weight, ids, context)
    kinds = encoded.data[: -(-len(ids) // 4)]
    each = torch.stack([kinds >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)[: len(ids)]
    return np.array([2, 4, 8])[each.numpy()]


def mean_bits(snapshots: list[ShardSnapshot], codec: ImportanceWeighted) -> float:
    """Return the mean bits per value over all rows to write."""
    parts = [(widths(s, codec), s.shard.shape.dim) for s in snapshots]
    return sum(float(w.sum()) * dim for w, dim in parts) / sum(len(w) * dim for w, dim in parts)


def constants(surveys: list[Surveys]) -> dict[tuple[float | None, float | None], float | None]:
    """Settle all ranks' surveys; return the constants by the codecs' offsets and budgets."""
    settled = settle(surveys).values()
    assert all(isinstance(codec, ImportanceWeighted) for codec in settled)
    return {(c.offset, c.mean_bits): c.constant for c in settled}  # type: ignore[attr-defined]  # the importance codec


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.floats(2.2, 7.8), st.integers(1, 5))
def test_the_budget_is_kept_over_all_tables(seed: int, budget: float, tables: int) -> None:
    rng = np.random.default_rng(seed)
    snapshots = [
        shard(f"t{i}", int(rng.integers(500, 6000)), int(rng.integers(1, 20)), -4.0 * i, seed + i)
        for i in range(tables)
    ]
    quantization = Quantization(method="importance", mean_bits=budget, exact_below_rows=0)
    found = constants([survey(snapshots[::2], quantization), survey(snapshots[1::2], quantization)])
    constant = found[(None, budget)]
    assert constant is not None
    codec = ImportanceWeighted(mean_bits=budget, constant=constant)
    assert mean_bits(snapshots, codec) == pytest.approx(budget, abs=0.1)


def test_a_table_that_matters_more_gets_more() -> None:
    """Give a more important table more bits; a budget per table would give both the same."""
    snapshots = [shard("hot", 3000, 16, 0.0), shard("cold", 3000, 16, -20.0)]
    quantization = Quantization(method="importance", mean_bits=4)
    surveys = [survey(snapshots, quantization)]
    found, settled = constants(surveys), settle(surveys)
    means = []
    for snapshot in snapshots:
        encoding = quantization.for_table(snapshot.shard.table, 3000).settled(settled)
        assert isinstance(encoding.codec, ImportanceWeighted)
        assert encoding.codec.spec()["constant"] == found[(None, 4)]
        means.append(mean_bits([snapshot], encoding.codec))
    assert means[0] > 5.5
    assert means[1] < 2.5
    alone = ImportanceWeighted(mean_bits=4)
    assert [mean_bits([s], alone) for s in snapshots] == pytest.approx([4, 4], abs=0.05)


def test_the_budget_is_of_the_rows_that_are_written() -> None:
    """Count only modified rows in a differential checkpoint."""
    snapshots = [shard("t", 20_000, 8, 0.0, modified=4000), shard("u", 5000, 8, -10.0, modified=0)]
    quantization = Quantization(method="importance", mean_bits=3)
    found = constants([survey(snapshots, quantization)])
    constant = found[(None, 3)]
    assert constant is not None
    codec = ImportanceWeighted(mean_bits=3, constant=constant)
    assert mean_bits(snapshots[:1], codec) == pytest.approx(3, abs=0.1)


def test_an_offset_is_to_a_row_with_the_median_sum() -> None:
    snapshots = [shard("a", 4000, 4, 6.0), shard("b", 4001, 4, 6.0, seed=1)]
    quantization = Quantization(method="importance", offset=7.0)
    found = constants([survey(snapshots, quantization)])
    assert found[(7.0, None)] == pytest.approx(7.0 - 6.0 / 2, abs=0.2)


def test_tables_of_different_budgets() -> None:
    quantization = Quantization(
        method="importance",
        mean_bits=3,
        tables={
            "b": Quantization(method="importance", mean_bits=6),
            "c": Quantization(bits=4),
        },
    )
    snapshots = [shard(name, 2000, 8, 0.0) for name in "abc"]
    surveys = [survey(snapshots, quantization)]
    found, settled = constants(surveys), settle(surveys)
    assert set(found) == {(None, 3), (None, 6)}
    for snapshot, bits in zip(snapshots, (3, 6), strict=False):
        encoding = quantization.for_table(snapshot.shard.table, 2000).settled(settled)
        assert isinstance(encoding.codec, ImportanceWeighted)
        assert mean_bits([snapshot], encoding.codec) == pytest.approx(bits, abs=0.1)


def test_rows_never_trained_get_the_least_width() -> None:
    snapshot = shard("t", 4000, 8, 0.0)
    snapshot.shard.optimizer["momentum1"][1000:] = 0
    counts = ImportanceSurvey()
    counts.add(snapshot.shard.weight, snapshot.shard.optimizer["momentum1"])
    codec = ImportanceWeighted(mean_bits=3)
    codec = codec.settle(counts)
    assert (widths(snapshot, codec)[1000:] == 2).all()
    assert mean_bits([snapshot], codec) == pytest.approx(3, abs=0.1)


def test_no_rows_and_no_state() -> None:
    """Leave codecs without a survey unsettled."""
    quantization = Quantization(method="importance", mean_bits=4)
    stateless = shard("t", 2000, 8, 0.0, state=False)
    empty = shard("u", 2000, 8, 0.0, modified=0)
    assert settle([survey([stateless, empty], quantization), {}]) == {}
    encoding = quantization.for_table("t", 2000)
    assert encoding.settled({}) is encoding


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.integers(1, 3000), st.integers(1, 200), st.booleans())
def test_a_sample_is_spread_evenly(seed: int, rows: int, size: int, some: bool) -> None:
    snapshot = shard("t", rows, 1, 0.0)
    chosen = np.arange(rows)
    if some:
        marks = torch.rand(rows, generator=torch.Generator().manual_seed(seed % 2**31)) < 0.3
        snapshot = ShardSnapshot(snapshot.shard, RowSet(marks))
        chosen = np.flatnonzero(marks.numpy())
    positions, count = snapshot.sample(size)
    assert count == len(chosen)
    step = max(1, count // size)
    assert positions.tolist() == chosen[::step].tolist()
