"""Sample rows that several ranks have, to notice ranks that train copies of their own.

Of a data-parallel table each rank writes a share. Where the ranks' copies differ, the checkpoint is
a mixture of them that no rank has trained. In two-dimensional parallelism the lowest rank that has
a rectangle writes it, and what others have trained since the last average is lost. To compare all
rows, each rank would have to read whole tables at every save; a sample, digested on each rank,
tells of copies that were never alike, or that are stepped apart.
"""

from __future__ import annotations

import torch
import xxhash

from torchrec_checknrun.shards import LocalShard

SAMPLED_ROWS = 1024
"""Rows of a shard that are compared at most; all of a smaller one."""


class ReplicaSample:
    """Evenly spaced rows of a shard that other ranks have as well, with their optimizer state.

    Args:
        shard: the whole table, or the rectangle.

    Attributes:
        live: the rows in the table's memory, views ``(n, …)``: weight and optimizer states, these
            in the order of their names.
    """

    def __init__(self, shard: LocalShard) -> None:
        step = max(1, -(-shard.rectangle.rows // SAMPLED_ROWS))
        states = (state for _, state in sorted(shard.optimizer.items()))
        self.live = [tensor[::step] for tensor in (shard.weight, *states)]
        self._rows = self.live

    def copy(self) -> None:
        """Copy the rows now, for ``digest``."""
        for copy, rows in zip(self.keep(), self.live, strict=True):
            copy.copy_(rows)

    def keep(self) -> list[torch.Tensor]:
        """Return new memory for the rows, to be filled with those of the cut; later ``digest``
        reads these.
        """
        self._rows = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in self.live]
        return self._rows

    def digest(self) -> bytes:
        """Digest the rows: 16 bytes, alike where all bits are."""
        digest = xxhash.xxh3_128()
        for values in self._rows:
            digest.update(values.detach().contiguous().cpu().view(torch.uint8).numpy().data)
        return digest.digest()
