"""Define samples, and share out one stream of samples.

Every dataset of this recipe obeys the same three rules, kept in one place so that a position saved
on two ranks means the same on three: which samples are held out for evaluation, which slice of a
global batch belongs to a rank, and where a stream ends. A dataset itself only provides numbered
samples, as a sequence of chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torchrec.datasets.criteo import CAT_FEATURE_COUNT


class Samples(NamedTuple):
    """A number of samples, ready for the model."""

    dense: np.ndarray  # float32 (n, 13), already log-transformed
    sparse: np.ndarray  # int64 (n, 26), column f below num_embeddings_per_feature[f]
    labels: np.ndarray  # float32 (n,), 0 or 1


class Dataset(Protocol):
    """A numbered stream of training samples, and held-out samples that are never trained."""

    def read(
        self, position: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Samples]:
        """Yield this rank's contiguous slice of every whole global batch, from sample `position`
        on.

        A rest smaller than `global_batch` at the end of the stream is not trained.
        """
        ...

    def read_eval(self, limit: int, batch: int, rank: int, world_size: int) -> Iterator[Samples]:
        """Yield at most `limit` held-out samples over all ranks, at most `batch` per rank and
        batch.

        The same every time. All ranks yield equally many batches of equal sizes, therefore up to
        world_size - 1 samples at the end are left out; without held-out samples there are no
        batches.
        """
        ...


class Chunk(Protocol):
    """A run of consecutive samples of a dataset, which may be expensive to read."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Samples:
        """Return the samples with these numbers, counted from the start of the chunk, ascending."""
        ...


def local_batch(global_batch: int, rank: int, world_size: int) -> int:
    """Return the number of samples that each rank takes of a global batch."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; expected 0 to {world_size - 1}, for {world_size} ranks")
    if global_batch < 1 or global_batch % world_size:
        raise ValueError(
            f"the global batch has {global_batch} samples, which {world_size} ranks cannot share "
            f"equally; choose a positive multiple of {world_size}"
        )
    return global_batch // world_size


def require_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number from a least one on, as Hydra's 1e6 is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value}; expected a whole number, {least} or more")


@dataclass(frozen=True)
class Holdout:
    """A split that holds out the last of every `every` raw samples; 0 holds out none."""

    every: int

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 0 or self.every == 1:
            raise ValueError(
                f"dataset.holdout_every is {self.every}; expected 0 (hold out none) or at least 2 "
                "(hold out every n-th sample)"
            )

    def trained_before(self, raw: int) -> int:
        return raw - self.held_out_before(raw)

    def held_out_before(self, raw: int) -> int:
        return raw // self.every if self.every else 0

    def trained(self, first: int, last: int) -> np.ndarray:
        """Return the raw numbers of training samples `first` to `last` (excluded)."""
        numbers = np.arange(first, last, dtype=np.int64)
        return numbers + numbers // (self.every - 1) if self.every else numbers

    def held_out(self, first: int, last: int) -> np.ndarray:
        """Return the raw numbers of held-out samples `first` to `last` (excluded)."""
        return np.arange(first, last, dtype=np.int64) * self.every + (self.every - 1)


class _Span(NamedTuple):
    """Samples `first` to `last` (excluded) of a stream, and how to get some of them."""

    first: int
    last: int
    take: Callable[[int, int], Samples]


class _Wanted(NamedTuple):
    """Samples `first` to `last` of a stream, due once the stream is known to reach `needs`."""

    first: int
    last: int
    needs: int


class ChunkedDataset(ABC):
    """A dataset that is one sequence of chunks, read `epochs` times over.

    Raw sample i is the i-th of the chunks; training and held-out samples are numbered separately
    (see `Holdout`). Position p of training is sample p % n of epoch p // n where an epoch has n
    training samples; a global batch may lie across two epochs.
    """

    def __init__(
        self, num_embeddings_per_feature: Sequence[int], holdout_every: int, epochs: int
    ) -> None:
        self.num_embeddings = np.array([int(n) for n in num_embeddings_per_feature], np.int64)
        if len(self.num_embeddings) != CAT_FEATURE_COUNT or (self.num_embeddings < 1).any():
            raise ValueError(
                f"num_embeddings_per_feature is {self.num_embeddings.tolist()}; expected "
                f"{CAT_FEATURE_COUNT} table sizes of at least 1, one per categorical feature"
            )
        require_whole("dataset.epochs", epochs, 1)
        self.epochs = epochs
        self.holdout = Holdout(holdout_every)
        self._held_out_counts: dict[int, int] = {}

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the raw samples in one pass."""

    def eval_chunks(self) -> Iterator[Chunk] | None:
        """Yield samples for evaluation only in one pass; None: some of `chunks()` are held out."""
        return None

    def read(
        self, position: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Samples]:
        local = local_batch(global_batch, rank, world_size)
        if position < 0:
            raise ValueError(f"the position is {position}; expected a number of samples, 0 or more")

        def wanted() -> Iterator[_Wanted]:
            batch = position
            while True:
                first = batch + rank * local
                batch += global_batch
                yield _Wanted(first, first + local, needs=batch)

        return _collect(self._training_spans(position, global_batch), wanted())

    def read_eval(self, limit: int, batch: int, rank: int, world_size: int) -> Iterator[Samples]:
        local_batch(batch * world_size, rank, world_size)

        def wanted() -> Iterator[_Wanted]:
            total = self._count_held_out(limit)
            done = 0
            while size := min(batch, (total - done) // world_size):
                first = done + rank * size
                done += size * world_size
                yield _Wanted(first, first + size, needs=done)

        return _collect(self._held_out_spans(), wanted())

    def _training_spans(self, position: int, global_batch: int) -> Iterator[_Span]:
        epoch = 0
        length = 0  # training samples per epoch, known after the first pass
        while epoch < self.epochs:
            raw = 0
            for chunk in self.chunks():
                yield self._training_span(chunk, raw, epoch * length)
                raw += len(chunk)
            length = self.holdout.trained_before(raw)
            # The position may be far down the stream: skip the epochs in between.
            epoch = max(epoch + 1, min(position // max(length, 1), self.epochs))
        total = self.epochs * length
        if total < global_batch or position > total:
            raise ValueError(
                f"{self.describe()} has {total} training samples in {self.epochs} epoch(s), but "
                f"training continues at sample {position} with global batches of {global_batch}; "
                "give more data, a smaller batch, or a checkpoint that belongs to this data"
            )

    def _training_span(self, chunk: Chunk, raw: int, before: int) -> _Span:
        def take(first: int, last: int) -> Samples:
            return chunk.take(self.holdout.trained(first - before, last - before) - raw)

        first = before + self.holdout.trained_before(raw)
        return _Span(first, before + self.holdout.trained_before(raw + len(chunk)), take)

    def _held_out_spans(self) -> Iterator[_Span]:
        chunks = self.eval_chunks()
        held_out = self.holdout if chunks is None else None
        raw = 0
        for chunk in self.chunks() if chunks is None else chunks:
            yield self._held_out_span(chunk, raw, held_out)
            raw += len(chunk)

    def _held_out_span(self, chunk: Chunk, raw: int, holdout: Holdout | None) -> _Span:
        if holdout is None:
            return _Span(raw, raw + len(chunk), lambda a, b: chunk.take(np.arange(a, b) - raw))
        first, last = (holdout.held_out_before(r) for r in (raw, raw + len(chunk)))
        return _Span(first, last, lambda a, b: chunk.take(holdout.held_out(a, b) - raw))

    def _count_held_out(self, limit: int) -> int:
        """Return the number of samples held out, at most `limit`: the last batch's size follows."""
        if limit not in self._held_out_counts:
            count = 0
            if limit > 0 and (self.holdout.every or self.eval_chunks() is not None):
                for span in self._held_out_spans():
                    count = min(limit, span.last)
                    if count == limit:
                        break
            self._held_out_counts[limit] = count
        return self._held_out_counts[limit]

    def describe(self) -> str:
        """Describe this dataset for errors."""
        return "the dataset"


def _collect(spans: Iterable[_Span], wanted: Iterator[_Wanted]) -> Iterator[Samples]:
    """Yield the wanted ranges, each as soon as the spans reach its end."""
    pieces: list[Samples] = []
    want = next(wanted, None)
    for span in spans:
        while want is not None:
            first, last = max(want.first, span.first), min(want.last, span.last)
            if first < last:
                pieces.append(span.take(first, last))
            if span.last < want.needs:
                break
            yield _concatenate(pieces)
            pieces = []
            want = next(wanted, None)
        if want is None:
            return


def _concatenate(pieces: list[Samples]) -> Samples:
    if len(pieces) == 1:
        return pieces[0]
    return Samples(*(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))
