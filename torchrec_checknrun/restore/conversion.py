"""Convert stored rows to a shard of other columns, or with optimizer state of another kind.

Row-wise optimizer state is one value per row *and column shard*: of row-wise Adagrad, the mean
squared gradient over the shard's own columns. So the state of a shard joined from several is their
mean, weighted by columns, which is exactly the state that the shard would have accumulated itself;
the same holds for the mean of pointwise state. A part of a saved shard gets the saved value: the
right mean, but an approximation of what its columns would have accumulated.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import torch

from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.shards import LocalShard, Rows, put_rows

logger = logging.getLogger(__name__)

Columns = tuple[int, int]


def is_converted(shard: LocalShard, header: RowsHeader) -> bool:
    """Return whether rows were stored with other columns, or another kind of state, than a
    shard's.
    """
    stored, own = header.rectangle, shard.rectangle
    rowwise = {name: state.dim() == 1 for name, state in shard.optimizer.items()}
    return (stored.col_start, stored.col_stop) != (own.col_start, own.col_stop) or any(
        rowwise.get(name, stored_rowwise) != stored_rowwise
        for name, (_, stored_rowwise) in header.optimizer.items()
    )


class Conversion:
    """A conversion of stored rows into one local shard.

    Takes memory for ``rows`` values for each row-wise state and each stored column range that
    overlaps the shard.

    Args:
        shard: the shard to write.
    """

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._parts: dict[str, dict[Columns, torch.Tensor]] = {}
        self._restored = torch.zeros(shard.rectangle.rows, dtype=torch.bool, device="cpu")
        self._approximated = False
        self._lock = threading.Lock()

    def scatter(self, header: RowsHeader, rows: Rows) -> None:
        """Write the shard's columns of stored rows, all within the shard's row range. Several
        threads may write at once, each other rows or columns.
        """
        own, stored = self._shard.rectangle, header.rectangle
        columns = max(own.col_start, stored.col_start), min(own.col_stop, stored.col_stop)
        target = slice(columns[0] - own.col_start, columns[1] - own.col_start)
        source = slice(columns[0] - stored.col_start, columns[1] - stored.col_start)
        pointwise = {}
        for name, state in rows.optimizer.items():
            if self._shard.optimizer[name].dim() == 1:
                mean = state if state.dim() == 1 else state[:, source].double().mean(dim=1)
                self._collect(name, columns, rows.ids, mean)
                if state.dim() == 1 and columns != (stored.col_start, stored.col_stop):
                    self._approximated = True  # by any thread
            elif state.dim() == 1:
                pointwise[name] = state[:, None].expand(-1, columns[1] - columns[0])
                self._approximated = True
            else:
                pointwise[name] = state[:, source]
        part = replace(
            self._shard,
            weight=self._shard.weight[:, target],
            optimizer={name: self._shard.optimizer[name][:, target] for name in pointwise},
        )
        part.scatter(Rows(rows.ids, rows.weight[:, source], pointwise))

    def finish(self) -> None:
        """Join the row-wise states, once all rows are written."""
        own = self._shard.rectangle
        for name, parts in self._parts.items():
            joined = torch.zeros(own.rows, dtype=torch.float64, device="cpu")
            # Column by column, in whatever order they came, and divided once: the same bits on any
            # ranks, also where a mean lies in the middle of two numbers.
            for (start, stop), values in sorted(parts.items(), key=lambda part: part[0]):
                joined.add_(values, alpha=stop - start)
            joined.div_(own.cols)
            target = self._shard.optimizer[name]  # new rows of a table that grew are not written
            target.copy_(torch.where(self._restored.to(target.device), joined.to(target), target))
        if self._shard.optimizer and self._approximated:
            logger.warning(
                "%s: optimizer state was kept per row for more columns than these, or is pointwise "
                "now: the row's value is used, an approximation of the accumulated state",
                self._shard,
            )
        elif self._parts:
            logger.info("%s: row-wise optimizer state is the mean over columns", self._shard)

    def _collect(
        self, name: str, columns: Columns, ids: torch.Tensor, values: torch.Tensor
    ) -> None:
        with self._lock:
            parts = self._parts.setdefault(name, {})
            if columns not in parts:
                rows = self._shard.rectangle.rows
                parts[columns] = torch.zeros(rows, dtype=torch.float32, device="cpu")
        local = ids - self._shard.rectangle.row_start
        put_rows(parts[columns], local, values)
        self._restored[local] = True
