"""Draw the synthetic dataset reproducibly, sample by sample, in the shape of Criteo's data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.synthetic import BASE_RATE, PERMANENT, Synthetic, _scatter, mix
from tests.distributed.small_job import Workers
from tests.examples import examples

# In the shape of Kaggle's tables, a thousand times smaller.
SIZES = [*(3, 10131, 2203, 13, 93, 6, 8352, 5461, 7047, 286, 143), *range(3, 18)]
COUNT = 50_000


@pytest.fixture(scope="module")
def dataset() -> Synthetic:
    return Synthetic(SIZES, samples=COUNT, seed=1)


@pytest.fixture(scope="module")
def samples(dataset: Synthetic) -> Samples:
    return dataset.generate(np.arange(COUNT))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    return float(binary_auroc(torch.from_numpy(scores).sigmoid(), torch.from_numpy(labels).long()))


def digest() -> str:
    samples = Synthetic([5, 70, 900] * 8 + [3, 11], samples=10**6).generate(np.arange(500))
    return hashlib.sha256(b"".join(part.tobytes() for part in samples)).hexdigest()


def test_same_in_every_process(workers: Workers) -> None:
    """Another process has another seed of hashes."""
    assert workers(1).run(digest) == [digest()]


@settings(max_examples=examples(40), deadline=None)
@given(rows=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=60, unique=True))
def test_a_sample_does_not_depend_on_what_is_asked_with_it(
    dataset: Synthetic, samples: Samples, rows: list[int]
) -> None:
    asked = np.array(sorted(rows))
    for got, known in zip(dataset.generate(asked), samples, strict=True):
        assert got.tobytes() == known[asked].tobytes()
    alone = [dataset.probability(asked[i : i + 1]) for i in range(len(asked))]
    assert np.concatenate(alone).tobytes() == dataset.probability(asked).tobytes()


def test_seeds_differ(samples: Samples) -> None:
    other = Synthetic(SIZES, samples=COUNT, seed=2).generate(np.arange(1000))
    for column in range(13):
        assert (other.dense[:, column] != samples.dense[:1000, column]).mean() > 0.3
    large = np.array(SIZES) > 1000
    assert (other.sparse != samples.sparse[:1000])[:, large].mean() > 0.9


def test_types_and_ranges(samples: Samples) -> None:
    assert [a.dtype for a in samples] == [np.float32, np.int64, np.float32]
    assert [a.shape for a in samples] == [(COUNT, 13), (COUNT, 26), (COUNT,)]
    assert (samples.sparse >= 0).all()
    assert (samples.sparse < SIZES).all()
    assert set(np.unique(samples.labels)) == {0.0, 1.0}
    small = [f for f, size in enumerate(SIZES) if size <= PERMANENT]
    assert all(len(np.unique(samples.sparse[:, f])) == SIZES[f] for f in small)


def test_dense_values_are_logs_of_heavy_tailed_counts(samples: Samples) -> None:
    counts = np.expm1(samples.dense.astype(np.float64))
    np.testing.assert_allclose(counts, counts.round(), rtol=1e-5)
    assert (counts >= 0).all()
    assert (counts.max(axis=0) > 50 * np.median(counts, axis=0)).all()
    assert ((counts == 0).mean(axis=0) > 0.01).all()  # zero is an ordinary count


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.0, 1.1, 1.5])
def test_ids_follow_zipfs_law(zipf: float) -> None:
    size, count = 1000, 40_000
    dataset = Synthetic([size] * 26, samples=count, zipf=zipf, vocabulary_start=1.0)
    ids = dataset.generate(np.arange(count)).sparse
    edges = np.arange(1.0, size + 2)
    cdf = np.log(edges) if zipf == 1 else (edges ** (1 - zipf) - 1) / (1 - zipf)
    probability = np.diff(cdf) / cdf[-1]
    for feature in (0, 25):
        frequency = np.sort(np.bincount(ids[:, feature], minlength=size))[::-1] / count
        for top in (1, 10, 100):
            wanted = probability[:top].sum()
            # Sorting by frequency favours ids that are frequent by chance among equally likely
            # ones.
            assert wanted - 0.01 < frequency[:top].sum() < wanted * 1.1 + 0.04
    columns = ids[:, 0], ids[:, 25]
    assert abs(np.corrcoef(*columns)[0, 1]) < 0.03  # features are drawn independently


def test_popular_ids_spread_over_row_shards(samples: Samples) -> None:
    for feature in np.flatnonzero(np.array(SIZES) > 1000):
        size = SIZES[feature]
        ids, counts = np.unique(samples.sparse[:, feature], return_counts=True)
        popular = ids[np.argsort(counts)[-64:]]
        per_shard = np.bincount(popular * 4 // size, minlength=4)
        assert (per_shard >= 8).all(), per_shard


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1460, 10_000])
def test_scattering_ranks_is_a_bijection(rows: int) -> None:
    assert len({rank * _scatter(rows) % rows for rank in range(rows)}) == rows


def test_new_ids_appear_over_time(dataset: Synthetic, samples: Samples) -> None:
    feature = SIZES.index(10131)
    vocabulary = dataset.vocabulary(np.array([0, COUNT // 2, COUNT - 1]))[:, feature]
    assert vocabulary[0] == PERMANENT + np.ceil((10131 - PERMANENT) / 2)
    assert vocabulary[0] < vocabulary[1] < vocabulary[2] == 10131
    # Ids that exist only at the end appear in the last tenth, never in the first.
    multiplier = _scatter(10131)
    ranks = np.empty(10131, np.int64)
    rows = (np.arange(10131) * multiplier + int(dataset._offsets[feature])) % 10131
    ranks[rows] = np.arange(10131)
    late = ranks[samples.sparse[:, feature]] >= vocabulary[1]
    assert not late[: COUNT // 2].any()
    assert late[-COUNT // 10 :].any()
    assert (np.diff(dataset.vocabulary(np.arange(COUNT)), axis=0) >= 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_labels_are_the_teachers(seed: int) -> None:
    dataset = Synthetic(SIZES, samples=COUNT, seed=seed)
    rows = np.arange(COUNT)
    labels, probability = dataset.generate(rows).labels, dataset.probability(rows)
    assert abs(labels.mean() - BASE_RATE) < 0.015
    for low in np.arange(0, 1, 0.1):  # calibrated: of samples at 30 %, 30 % are clicks
        among = (probability >= low) & (probability < low + 0.1)
        if among.sum() > 500:
            assert abs(labels[among].mean() - probability[among].mean()) < 0.05
    # The bound of any model: the one of a model that knows the teacher.
    assert 0.84 < auc(labels, probability) < 0.90


def test_without_drift_nothing_changes(dataset: Synthetic, samples: Samples) -> None:
    rows = np.arange(0, COUNT, 7)
    still = Synthetic(SIZES, samples=COUNT, seed=1, drift=0.0)
    for got, known in zip(still.generate(rows), samples, strict=True):
        assert got.tobytes() == known[rows].tobytes()


@pytest.mark.parametrize("drift", [0.5, 1.0])
def test_the_truth_drifts(drift: float, dataset: Synthetic, samples: Samples) -> None:
    moving = Synthetic(SIZES, samples=COUNT, seed=1, drift=drift)
    drifted = moving.generate(np.arange(COUNT))
    assert drifted.sparse.tobytes() == samples.sparse.tobytes()  # only the labels are others
    assert drifted.dense.tobytes() == samples.dense.tobytes()
    assert abs(drifted.labels.mean() - BASE_RATE) < 0.015
    parts = np.array_split(np.arange(COUNT), 5)
    # Who knows the truth of now is as good all the time ...
    assert all(0.84 < auc(drifted.labels[part], moving.probability(part)) < 0.90 for part in parts)
    # ... and who knows the truth of the start is wrong about more and more ids.
    known = dataset.probability(np.arange(COUNT))
    stale = [auc(drifted.labels[part], known[part]) for part in parts]
    assert all(later < earlier - 0.02 for earlier, later in pairwise(stale))
    assert stale[-1] < (0.73 if drift == 0.5 else 0.61)


def test_each_id_changes_at_a_moment_of_its_own() -> None:
    teacher = Synthetic(SIZES, samples=COUNT)._teacher
    ids = np.tile(np.arange(500)[:, None], 26)
    single = [
        teacher._parts(np.zeros((500, 13)), ids, np.full(500, drifted))[0]
        for drifted in (0.0, 0.01, 0.02, 0.03)
    ]
    # A row has 26 ids: one of them changes in a hundredth of the time with probability 0.23.
    changed = [(a != b).mean() for a, b in pairwise(single)]
    assert all(0.13 < share < 0.33 for share in changed)


def test_a_model_learns_from_it() -> None:
    """Train embeddings with pairwise products and a linear part on one pass of 40,000 samples."""
    torch.manual_seed(0)
    dataset = Synthetic(SIZES, samples=50_000)
    offsets = torch.tensor([0, *SIZES[:-1]]).cumsum(0)
    single = torch.nn.Embedding(sum(SIZES), 1)
    factors = torch.nn.Embedding(sum(SIZES), 4)
    torch.nn.init.zeros_(single.weight)
    torch.nn.init.normal_(factors.weight, std=0.1)
    dense = torch.nn.Linear(13, 1)
    parameters = [p for m in (single, factors, dense) for p in m.parameters()]
    optimizer = torch.optim.Adagrad(parameters, lr=0.05)

    def logits(batch: Samples) -> torch.Tensor:
        ids = torch.from_numpy(batch.sparse) + offsets
        v = factors(ids)
        pairs = (v.sum(1).square() - v.square().sum(1)).sum(1)
        return single(ids).sum((1, 2)) + pairs + dense(torch.from_numpy(batch.dense))[:, 0]

    for batch in dataset.read(0, 200, 0, 1):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits(batch), torch.from_numpy(batch.labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def held_out() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in dataset.read_eval(5000, 1000, 0, 1):
            yield batch.labels, logits(batch).detach().numpy()

    labels, scores = (np.concatenate(parts) for parts in zip(*held_out(), strict=True))
    assert len(labels) == 5000
    assert auc(labels, scores) > 0.75


def test_mix_is_splitmix64() -> None:
    # The first outputs of the published generator for seed 0, whose state grows by this constant.
    state = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [f"{x:016x}" for x in mix(state).tolist()] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "06c45d188009454f",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"zipf": -0.1},
        {"zipf": 9.0},
        {"vocabulary_start": 1.5},
        {"drift": -1.0},
        {"drift": float("nan")},
    ],
)
def test_impossible_options_are_named(options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=rf"dataset\.{option} is {value}"):
        Synthetic(SIZES, **options)
