"""Row-wise optimizer state from one column sharding to another.

A table that is split by columns keeps a value of row-wise state per row *and column shard*: of
row-wise Adagrad, the mean squared gradient over the shard's own columns. Hence the state of a shard
made of several is their mean, weighted by columns: exactly what it would have accumulated itself. A
shard that is a part of one gets that one's value: the right mean, not what it would have
accumulated.
"""

from __future__ import annotations

import logging

import torch

from torchrec_checknrun.shards import LocalShard

logger = logging.getLogger(__name__)

Columns = tuple[int, int]


class RowwiseConversion:
    """Collects the row-wise states of one local shard by stored column range, then joins them.

    Args:
        shard: where the states go. Memory: ``rows`` values for each stored column range that the
            shard overlaps, and each state.
    """

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._parts: dict[str, dict[Columns, torch.Tensor]] = {}

    def put(self, columns: Columns, ids: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Takes stored values ``(n,)`` of the rows ``ids`` (global); later ones replace earlier."""
        parts = self._parts.setdefault(name, {})
        if columns not in parts:
            parts[columns] = torch.zeros(self._shard.rectangle.rows, dtype=torch.float32)
        local = ids - self._shard.rectangle.row_start
        parts[columns].index_copy_(0, local, values.to(torch.float32))

    def finish(self) -> None:
        """Writes the joined states into the shard."""
        own = self._shard.rectangle
        for name, parts in self._parts.items():
            joined = torch.zeros(own.rows, dtype=torch.float64)
            for (start, stop), values in parts.items():
                common = min(stop, own.col_stop) - max(start, own.col_start)
                joined.add_(values, alpha=common / own.cols)
            target = self._shard.optimizer[name]
            target.copy_(joined.to(target))
        if not self._parts:
            return
        inside = all(
            start >= own.col_start and stop <= own.col_stop
            for parts in self._parts.values()
            for start, stop in parts
        )
        logger.log(
            logging.INFO if inside else logging.WARNING,
            "%s: row-wise optimizer state of columns %s %s",
            self._shard,
            sorted({columns for parts in self._parts.values() for columns in parts}),
            "joined by their weighted mean"
            if inside
            else "replicated: an approximation of what these columns would have accumulated",
        )
