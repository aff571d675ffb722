"""Rows into a shard of another shape: other columns, or optimizer state kept another way.

Row-wise optimizer state is one value per row *and column shard*: of row-wise Adagrad, the mean
squared gradient over the shard's own columns. So the state of a shard made of several is their
mean, weighted by columns: exactly what it would have accumulated itself; and so is the mean of
pointwise state. A shard that is a part of one gets that one's value, which is the right mean, but
not what these columns would have accumulated.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from torchrec_checknrun.format.row_chunk import RowsHeader
from torchrec_checknrun.shards import LocalShard, Rows

logger = logging.getLogger(__name__)

Columns = tuple[int, int]


def is_converted(shard: LocalShard, header: RowsHeader) -> bool:
    """Whether rows were stored with other columns or another kind of state than a shard has."""
    stored, own = header.rectangle, shard.rectangle
    rowwise = {name: state.dim() == 1 for name, state in shard.optimizer.items()}
    return (stored.col_start, stored.col_stop) != (own.col_start, own.col_stop) or any(
        rowwise.get(name, stored_rowwise) != stored_rowwise
        for name, (_, stored_rowwise) in header.optimizer.items()
    )


class Conversion:
    """Writes stored rows into one local shard that has them otherwise.

    Args:
        shard: where the rows go. Memory: ``rows`` values for each stored column range that overlaps
            the shard and each row-wise state.
    """

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._parts: dict[str, dict[Columns, torch.Tensor]] = {}
        self._restored = torch.zeros(shard.rectangle.rows, dtype=torch.bool, device="cpu")
        self._approximated = False

    def scatter(self, header: RowsHeader, rows: Rows) -> None:
        """Writes the columns of the rows (all within the shard) that the shard has."""
        own, stored = self._shard.rectangle, header.rectangle
        columns = max(own.col_start, stored.col_start), min(own.col_stop, stored.col_stop)
        target = slice(columns[0] - own.col_start, columns[1] - own.col_start)
        source = slice(columns[0] - stored.col_start, columns[1] - stored.col_start)
        pointwise = {}
        for name, state in rows.optimizer.items():
            if self._shard.optimizer[name].dim() == 1:
                mean = state if state.dim() == 1 else state[:, source].mean(dim=1)
                self._collect(name, columns, rows.ids, mean)
                self._approximated |= state.dim() == 1 and columns != (
                    stored.col_start,
                    stored.col_stop,
                )
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
        """Joins the row-wise states, when all rows have come."""
        own = self._shard.rectangle
        for name, parts in self._parts.items():
            joined = torch.zeros(own.rows, dtype=torch.float64, device="cpu")
            for (start, stop), values in parts.items():
                joined.add_(values, alpha=(stop - start) / own.cols)
            target = self._shard.optimizer[name]  # new rows of a table that grew stay as they are
            target.copy_(torch.where(self._restored.to(target.device), joined.to(target), target))
        if self._shard.optimizer and self._approximated:
            logger.warning(
                "%s: optimizer state was kept per row for more columns than these, or is pointwise "
                "now: each gets the row's value, which approximates what it would have accumulated",
                self._shard,
            )
        elif self._parts:
            logger.info("%s: row-wise optimizer state is the mean over columns", self._shard)

    def _collect(
        self, name: str, columns: Columns, ids: torch.Tensor, values: torch.Tensor
    ) -> None:
        parts = self._parts.setdefault(name, {})
        if columns not in parts:
            parts[columns] = torch.zeros(
                self._shard.rectangle.rows, dtype=torch.float32, device="cpu"
            )
        local = ids - self._shard.rectangle.row_start
        parts[columns].index_copy_(0, local, values.to(torch.float32))
        self._restored[local] = True
