"""Draw synthetic training data: always the same batch for one place in one rank's stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

BATCH = 8


class Clicks(IterableDataset[Batch]):
    """A stream of batches of dense and sparse features with labels.

    Args:
        rows: number of ids by feature.
        first: the batch to begin with.
        count: batches in all; the stream ends there.
    """

    def __init__(
        self, rows: Mapping[str, int], rank: int, count: int, dense: int = 3, first: int = 0
    ) -> None:
        self._rows, self._rank, self._count, self._dense = dict(rows), rank, count, dense
        self._first = first

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._first, self._count):
            yield self.batch(number)

    def batch(self, number: int) -> Batch:
        draw = torch.Generator().manual_seed(1000 * number + self._rank)
        lengths = torch.randint(0, 4, (len(self._rows), BATCH), generator=draw)
        values = [
            torch.randint(rows, (int(lengths[index].sum()),), generator=draw)
            for index, rows in enumerate(self._rows.values())
        ]
        return Batch(
            dense_features=torch.rand(BATCH, self._dense, generator=draw),
            sparse_features=KeyedJaggedTensor(
                keys=list(self._rows), values=torch.cat(values), lengths=lengths.reshape(-1)
            ),
            labels=torch.randint(2, (BATCH,), generator=draw),
        )
