"""Generate samples in Criteo's format for machines without Criteo's data.

Every value is computed from (seed, sample number, column) by a counter-based hash, so any sample is
available without those before it, on any rank, after any restart. Ids follow Zipf's law and spread
over the whole table; a table's vocabulary grows with the stream; labels are drawn from a planted
teacher of a kind that a DLRM can learn, so that loss and AUC are meaningful. The teacher can drift:
what is true of an id at the start of the stream is then no longer true at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import numpy as np
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT

from recipes.dlrm_criteo.samples import Chunk, ChunkedDataset, Samples, require_whole

BASE_RATE = 0.25  # of the labels; near Kaggle's
LOGIT_STD = 2.0  # of the teacher: the part of a label that is not chance
SHARES = (0.5, 0.3, 0.2)  # of the logit's variance: single ids, pairs of ids, dense features
RANK = 3  # of the teacher's interactions of ids
TAIL = np.linspace(1.2, 2.0, INT_FEATURE_COUNT)  # Pareto exponents of the dense counts
SCALE = np.geomspace(1.0, 50.0, INT_FEATURE_COUNT)  # and their scales
PERMANENT = 100  # ids of each table that exist from the start, for any vocabulary_start
MOST_DRIFT = 1000.0
_MOMENTS = np.uint64(0xD1B54A32D192ED03)  # sets the hash of an id's ages apart from its effects'
_CALIBRATION = 8192  # samples that set the teacher's scale and base rate
_BLOCK = 4096  # samples computed at once: keeps the intermediate arrays in the cache


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64: neighbouring numbers become independent-looking ones."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: int, purpose: int, count: int) -> np.ndarray:
    """Return one 64-bit key per column, different for each purpose and seed."""
    start = np.array([seed % 2**64], np.uint64)
    counter = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(purpose << 32)
    return mix(mix(start + np.uint64(0x9E3779B97F4A7C15)) ^ mix(counter))


def uniform(bits: np.ndarray) -> np.ndarray:
    """Convert hashes to numbers in (0, 1)."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


class Synthetic(ChunkedDataset):
    """A stream of `samples` raw samples, some of them held out by `holdout_every`.

    In raw sample i, feature f has rank r = 0, 1, ... in order of popularity, with a probability
    proportional to the integral of x^-zipf over [r + 1, r + 2], among the v(i) ids that exist then:
    v(i) = m + ceil((n - m) (s + (1 - s) i / samples)) for a table of n rows, m = min(n, 100) and
    s = vocabulary_start: new ids are the least popular ones, and a small table is complete from the
    start. Rank r is row (a r + b) mod n, with a near n times the golden ratio and b by the seed:
    neighbouring ranks lie far apart, so that every row shard has its part of the popular ids.

    With `drift`, the teacher gives each id new effects that many times between the first sample and
    the last, each id at moments of its own: a model that has stopped learning is wrong about more
    and more ids, while the best model stays as good as it was.
    """

    def __init__(
        self,
        num_embeddings_per_feature: Sequence[int],
        samples: int = 45_840_617,
        seed: int = 0,
        zipf: float = 1.1,
        vocabulary_start: float = 0.5,
        holdout_every: int = 10,
        epochs: int = 1,
        drift: float = 0.0,
    ) -> None:
        super().__init__(num_embeddings_per_feature, holdout_every, epochs)
        require_whole("dataset.samples", samples, 1)
        if not 0 <= zipf <= 5:
            raise ValueError(f"dataset.zipf is {zipf}; expected 0 (all ids alike) to 5")
        if not 0 <= vocabulary_start <= 1:
            raise ValueError(f"dataset.vocabulary_start is {vocabulary_start}; expected 0 to 1")
        if not 0 <= drift <= MOST_DRIFT:
            raise ValueError(
                f"dataset.drift is {drift}; expected 0 (none) to {MOST_DRIFT}, the times that an "
                "id's effects change over the stream"
            )
        self.samples = samples
        self.zipf = zipf
        self.vocabulary_start = vocabulary_start
        self._columns = keys(seed, 0, CAT_FEATURE_COUNT + INT_FEATURE_COUNT + 1)
        self._stream = keys(seed, 1, 1)
        self._multipliers = np.array([_scatter(int(n)) for n in self.num_embeddings], np.uint64)
        self._rows = self.num_embeddings.astype(np.uint64)
        self._offsets = keys(seed, 2, CAT_FEATURE_COUNT) % self._rows
        self._teacher = Teacher(seed)
        self.drift = drift
        self._drift = drift / samples
        every = np.linspace(0, samples - 1, _CALIBRATION).astype(np.int64)
        self._teacher.calibrate(*self._features(every)[:2], every * self._drift)

    def chunks(self) -> Iterator[Chunk]:
        return iter([_Whole(self)])

    def describe(self) -> str:
        return "the synthetic dataset (dataset.samples)"

    def generate(self, raw: np.ndarray) -> Samples:
        """Generate the samples with these raw numbers."""
        blocks = [self._block(raw[i : i + _BLOCK]) for i in range(0, len(raw), _BLOCK)]
        return Samples(*(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))

    def probability(self, raw: np.ndarray) -> np.ndarray:
        """Return the teacher's probability of label 1, the best prediction of any model."""
        return self._teacher.probability(*self._features(raw)[:2], raw * self._drift)

    def vocabulary(self, raw: np.ndarray) -> np.ndarray:
        """Return the number of ids of each feature that exist at these samples, (n, 26)."""
        start = self.vocabulary_start
        share = start + (1 - start) * (raw[:, None] / self.samples)
        permanent = np.minimum(self.num_embeddings, PERMANENT)
        return permanent + np.ceil(share * (self.num_embeddings - permanent))

    def _block(self, raw: np.ndarray) -> Samples:
        dense, ids, chance = self._features(raw)
        labels = chance < self._teacher.probability(dense, ids, raw * self._drift)
        return Samples(dense.astype(np.float32), ids, labels.astype(np.float32))

    def _features(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return dense values, ids, and the random numbers that decide the labels."""
        sample = mix(raw.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._stream)
        values = uniform(mix(sample[:, None] ^ self._columns))
        categories, counts, chance = np.split(
            values, [CAT_FEATURE_COUNT, CAT_FEATURE_COUNT + INT_FEATURE_COUNT], axis=1
        )
        ranks = self._ranks(categories, self.vocabulary(raw)).astype(np.uint64)
        ids = ((ranks * self._multipliers + self._offsets) % self._rows).astype(np.int64)
        dense = np.log1p(np.floor(SCALE * (counts ** (-1 / TAIL) - 1)))
        return dense, ids, chance[:, 0]

    def _ranks(self, u: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
        """Invert the ranks' distribution function."""
        log_last, flat = np.log1p(vocabulary), 1 - self.zipf
        if abs(flat) < 1e-9:
            log_rank = u * log_last
        else:
            log_rank = np.log1p(u * np.expm1(flat * log_last)) / flat
        return np.clip(np.floor(np.expm1(log_rank)), 0, vocabulary - 1)


class _Whole:
    """The whole dataset as one chunk: every sample is equally near."""

    def __init__(self, dataset: Synthetic) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.samples

    def take(self, rows: np.ndarray) -> Samples:
        return self.dataset.generate(rows)


class Teacher:
    """A teacher that knows the probability of a click.

    The logit is the sum of the ids' own effects, of low-rank interactions between the ids of a
    sample (as in a factorization machine), and of a linear function of the dense values. An id's
    part in it is that of one of the id's ages, which begin at whole numbers plus a fraction of the
    id's own, in units of drift.
    """

    def __init__(self, seed: int) -> None:
        self._ids = keys(seed, 3, CAT_FEATURE_COUNT)
        signs = uniform(keys(seed, 4, INT_FEATURE_COUNT))
        self._dense = np.where(signs < 0.5, -1.0, 1.0) / np.arange(1, INT_FEATURE_COUNT + 1)
        self._means = np.zeros(3)
        self._scales = np.ones(3)
        self._bias = 0.0

    def calibrate(self, dense: np.ndarray, ids: np.ndarray, drifted: np.ndarray) -> None:
        """Give the three parts their shares of the variance, and the labels their base rate."""
        parts = self._parts(dense, ids, drifted)
        self._means = parts.mean(axis=1)
        self._scales = LOGIT_STD * np.sqrt(SHARES) / np.maximum(parts.std(axis=1), 1e-9)
        low, high = -20.0, 20.0
        logits = self._logits(dense, ids, drifted)
        for _ in range(50):
            self._bias = (low + high) / 2
            too_high = _sigmoid(logits + self._bias).mean() > BASE_RATE
            low, high = (low, self._bias) if too_high else (self._bias, high)

    def probability(self, dense: np.ndarray, ids: np.ndarray, drifted: np.ndarray) -> np.ndarray:
        """Return the probability of label 1; `drifted`: how far the truth had gone, by sample."""
        return _sigmoid(self._logits(dense, ids, drifted) + self._bias)

    def _logits(self, dense: np.ndarray, ids: np.ndarray, drifted: np.ndarray) -> np.ndarray:
        scaled = (self._parts(dense, ids, drifted) - self._means[:, None]) * self._scales[:, None]
        return scaled[0] + scaled[1] + scaled[2]

    def _parts(self, dense: np.ndarray, ids: np.ndarray, drifted: np.ndarray) -> np.ndarray:
        # One hash per id gives 16 bits for its own effect and for each of its RANK factors.
        bits = mix(ids.astype(np.uint64) ^ self._ids)
        if drifted.any():
            ages = np.floor(drifted[:, None] + uniform(mix(bits ^ _MOMENTS))).astype(np.uint64)
            bits = np.where(ages > 0, mix(bits + ages * _MOMENTS), bits)
        single, *factors = (
            (bits >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(1 + RANK)
        )
        pairs = np.zeros(len(ids))
        for factor in factors:
            centred = factor.astype(np.float64) / 2**15 - 1
            pairs += _row_sums(centred) ** 2 - _row_sums(centred**2)
        return np.stack(
            (_row_sums(single.astype(np.float64)), pairs, _row_sums(dense * self._dense))
        )


def _row_sums(values: np.ndarray) -> np.ndarray:
    """Sum values with bits that are independent of the number of samples (unlike a BLAS's)."""
    return values.sum(axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _scatter(rows: int) -> int:
    """Return the first number from the golden section of `rows` on that is coprime to `rows`.

    Multiplying by it modulo `rows` is therefore a bijection.
    """
    multiplier = max(1, round(rows * 0.6180339887498949))
    while gcd(multiplier, rows) != 1:
        multiplier += 1
    return multiplier
