"""Read every dataset's samples in the same order on any number of ranks, across any restart."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES

from recipes.dlrm_criteo import criteo_tsv
from recipes.dlrm_criteo.criteo_npy import CriteoNpy
from recipes.dlrm_criteo.criteo_tsv import CriteoTsv
from recipes.dlrm_criteo.reader import Reader
from recipes.dlrm_criteo.samples import ChunkedDataset, Samples
from recipes.dlrm_criteo.synthetic import Synthetic
from tests.examples import examples
from tests.unit.streams import (
    SIZES,
    assert_equal,
    eval_rounds,
    expected,
    global_batches,
    held_out_rows,
    join,
    random_rows,
    take,
    training_rows,
)

RAW = 203
EVERY = 7
EPOCHS = 3
KINDS = ("synthetic", "tsv", "tsv_gz", "tsv_skip", "npy")


class Case:
    """A dataset in several files, with all of its raw samples in order."""

    def __init__(self, dataset: ChunkedDataset, raw: Samples) -> None:
        self.dataset = dataset
        self.raw = raw
        self.training = take(raw, training_rows(RAW, EVERY) * EPOCHS)
        self.held_out = take(raw, held_out_rows(RAW, EVERY))


def build(kind: str, folder: Path) -> Case:
    if kind == "synthetic":
        synthetic = Synthetic(SIZES, samples=RAW, seed=3, holdout_every=EVERY, epochs=EPOCHS)
        return Case(synthetic, synthetic.generate(np.arange(RAW)))
    rows = random_rows(RAW)
    cuts = [0, 1, 90, 90, RAW]  # files of 1, 89, 0 and 113 samples
    parts = [rows[a:b] for a, b in pairwise(cuts)]
    if kind == "npy":
        for day, part in enumerate(parts):
            samples = expected(part)
            ids = [[v or 0 for v in row.ids] for row in part]
            np.save(folder / f"day_{day}_dense.npy", samples.dense)
            np.save(folder / f"day_{day}_sparse.npy", np.array(ids, np.int64).reshape(-1, 26))
            np.save(folder / f"day_{day}_labels.npy", samples.labels[:, None].astype(np.int32))
        npy = CriteoNpy(SIZES, str(folder), holdout_every=EVERY, epochs=EPOCHS)
        return Case(npy, expected(rows))
    for day, part in enumerate(parts):
        lines = [row.line() for row in part]
        if kind == "tsv_skip":
            for at in range(0, len(lines), 10):
                lines.insert(at, b"not\ta\tsample")
        text = b"".join(line + b"\n" for line in lines)
        name = folder / f"day_{day}"
        if kind == "tsv_gz":
            name.with_suffix(".gz").write_bytes(gzip.compress(text))
        else:
            name.write_bytes(text)
    tsv = CriteoTsv(
        SIZES,
        str(folder / "day_*"),
        on_bad_line="skip" if kind == "tsv_skip" else "raise",
        holdout_every=EVERY,
        epochs=EPOCHS,
    )
    return Case(tsv, expected(rows))


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo_tsv, "BLOCK", 1500)  # about six lines: many block borders
        yield build(request.param, tmp_path_factory.mktemp("data"))


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_same_sequence_on_any_ranks_and_over_any_restarts(case: Case, data: st.DataObject) -> None:
    total = len(case.training.labels)
    position = 0
    for _ in range(data.draw(st.integers(1, 3), label="restarts")):
        world_size = data.draw(st.integers(1, 4), label="world size")
        batch = world_size * data.draw(st.integers(1, 40), label="local batch")
        count = data.draw(st.integers(0, 5), label="batches before the restart")
        if position + batch > total:
            break
        for got in global_batches(case.dataset, position, batch, world_size, count):
            assert_equal(got, take(case.training, range(position, position + batch)))
            position += batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stream_ends_with_the_last_whole_global_batch(case: Case, world_size: int) -> None:
    batch = 12 * world_size
    total = len(case.training.labels)
    got = global_batches(case.dataset, 5, batch, world_size)
    assert len(got) == (total - 5) // batch
    assert_equal(join(got), take(case.training, range(5, 5 + len(got) * batch)))
    assert global_batches(case.dataset, total, batch, world_size) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [0, 1, 10, 1000])
def test_evaluation_is_the_same_on_any_number_of_ranks(
    case: Case, world_size: int, limit: int
) -> None:
    available = len(case.held_out.labels)
    for _ in range(2):
        rounds = list(eval_rounds(case.dataset, limit, 4, world_size))
        for parts in rounds:
            assert {len(part.labels) for part in parts} == {len(parts[0].labels)}
            assert 0 < len(parts[0].labels) <= 4
        count = min(limit, available) // world_size * world_size
        assert sum(len(part.labels) for parts in rounds for part in parts) == count
        if count:
            whole = join([part for parts in rounds for part in parts])
            assert_equal(whole, take(case.held_out, range(count)))


def test_training_goes_on_while_an_evaluation_reads(case: Case) -> None:
    stream = case.dataset.read(0, 10, 0, 1)
    got = []
    for _ in range(4):
        got.append(next(stream))
        list(case.dataset.read_eval(12, 3, 0, 1))
    assert_equal(join(got), take(case.training, range(40)))


def test_position_beyond_the_data_is_an_error(case: Case) -> None:
    total = len(case.training.labels)
    with pytest.raises(ValueError, match=rf"{total} training samples .* sample {total + 1} "):
        list(case.dataset.read(total + 1, 4, 0, 2))
    with pytest.raises(ValueError, match="smaller batch"):
        list(case.dataset.read(0, total + 1, 0, 1))


def test_reader_counts_what_was_trained_not_what_was_read(case: Case) -> None:
    reader = Reader(case.dataset, 8, 1, 2, "cpu")
    batches = iter(reader)
    in_flight = [next(batches) for _ in range(3)]
    assert reader.position == 0
    reader.trained()
    assert reader.state_dict() == {"samples": 8}

    resumed = Reader(case.dataset, 8, 1, 2, "cpu")
    assert isinstance(resumed, Stateful)
    resumed.load_state_dict(reader.state_dict())
    again = next(iter(resumed))
    assert torch.equal(again.dense_features, in_flight[1].dense_features)
    assert torch.equal(again.sparse_features.values(), in_flight[1].sparse_features.values())

    # The position is independent of the number of ranks and of the batch.
    other = Reader(case.dataset, 5, 0, 1, torch.device("cpu"))
    other.load_state_dict(reader.state_dict())
    assert_equal(
        Samples(next(iter(other)).dense_features.numpy(), *take(case.training, range(8, 13))[1:]),
        take(case.training, range(8, 13)),
    )


def test_reader_makes_torchrec_batches(case: Case) -> None:
    batch = next(iter(Reader(case.dataset, 6, 0, 1, "cpu")))
    samples = take(case.training, range(6))
    assert batch.dense_features.dtype == torch.float32
    assert batch.dense_features.shape == (6, 13)
    assert torch.equal(batch.labels, torch.from_numpy(samples.labels))
    features = batch.sparse_features
    assert features.keys() == DEFAULT_CAT_NAMES
    assert features.stride() == 6
    for column, name in enumerate(DEFAULT_CAT_NAMES):
        assert features[name].values().tolist() == samples.sparse[:, column].tolist()
        assert features[name].lengths().tolist() == [1] * 6


@pytest.mark.parametrize("state", [{}, {"samples": None}, {"samples": -1}])
def test_reader_refuses_a_state_that_is_none(state: dict[str, object]) -> None:
    reader = Reader(Synthetic(SIZES, samples=100), 4, 0, 1, "cpu")
    with pytest.raises(ValueError, match=r"expected \{'samples': n\}"):
        reader.load_state_dict(state)


def test_ranks_must_share_a_global_batch_equally() -> None:
    dataset = Synthetic(SIZES, samples=100)
    with pytest.raises(ValueError, match="10 samples, which 3 ranks cannot share equally"):
        Reader(dataset, 10, 0, 3, "cpu")
    with pytest.raises(ValueError, match="multiple of 3"):
        dataset.read(0, 10, 0, 3)
    with pytest.raises(ValueError, match="rank is 2"):
        dataset.read(0, 10, 2, 2)
    with pytest.raises(ValueError, match="position is -1"):
        dataset.read(-1, 10, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout_every": 1}, "holdout_every is 1"),
        ({"holdout_every": -2}, "holdout_every is -2"),
        ({"holdout_every": 10.0}, "holdout_every is 10.0"),
        ({"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ({"samples": 1e6}, "samples is 1000000.0; expected a whole number"),
        ({"epochs": 0}, "epochs is 0"),
    ],
)
def test_impossible_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Synthetic(SIZES, **{"samples": 100, **options})


@pytest.mark.parametrize("sizes", [SIZES[1:], [0, *SIZES[1:]]])
def test_one_table_size_per_feature(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="26 table sizes"):
        Synthetic(sizes, samples=100)


def test_without_a_holdout_all_is_trained_and_nothing_evaluated() -> None:
    dataset = Synthetic(SIZES, samples=100, holdout_every=0)
    assert sum(len(s.labels) for s in dataset.read(0, 10, 0, 1)) == 100
    assert list(dataset.read_eval(50, 10, 0, 1)) == []
