"""Make the rows of a small kernel as of a cut, beside a plain copy of them."""

from __future__ import annotations

import random
from collections.abc import Collection

import numpy as np
import torch

from torchrec_checknrun.marks.row_copies import (
    PAGE_BYTES,
    KernelCopies,
    Overflow,
    RowCopies,
    ShardAtCut,
    ShardCopies,
)

Frozen = list[tuple[torch.Tensor, int]]


def overflow(pages: int) -> Overflow:
    return Overflow(torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8))


def frozen_bytes(rows: set[int], size: int, bits: int = 1, noise: int = 0) -> Frozen:
    """Mark rows in bytes; ``noise`` sets bits that don't count."""
    marks = torch.full((size,), noise & ~bits, dtype=torch.uint8)
    marks[torch.tensor(sorted(rows), dtype=torch.int64)] |= bits
    return [(marks, bits)]


def frozen_bits(rows: set[int], size: int) -> Frozen:
    marks = np.zeros(size, dtype=np.uint8)
    marks[sorted(rows)] = 1
    return [(torch.from_numpy(np.packbits(marks, bitorder="little")), -1)]


class Shard:
    """A shard whose tensors are trained, its copies of one cut, and a plain copy of that cut.

    Args:
        tensors: live, with as many rows each.
        rows: of the cut; None: all.
        states: of a shard that lives through several cuts.
    """

    def __init__(
        self,
        copies: RowCopies,
        tensors: list[torch.Tensor],
        frozen: Frozen | None,
        rows: set[int] | None,
        generation: int = 1,
        states: torch.Tensor | None = None,
    ) -> None:
        self.tensors = tensors
        self.size = len(tensors[0])
        self.states = torch.zeros(self.size, dtype=torch.uint8) if states is None else states
        self.frozen = ShardAtCut(frozen, tensors, self.states, generation)
        self._cut = copies
        self._copies: ShardCopies | None = None
        self.at_cut = [tensor.clone() for tensor in tensors]
        self.rows = sorted(range(self.size) if rows is None else rows)
        self.left = set(self.rows)

    @property
    def copies(self) -> ShardCopies:
        """Return the shard's copies: those of a kernel, or of a kernel with no other shard."""
        if self._copies is None:
            self._copies = KernelCopies(self._cut, {0: self.frozen}).shards[0]
        return self._copies

    @copies.setter
    def copies(self, of_kernel: ShardCopies) -> None:
        self._copies = of_kernel

    @property
    def row_bytes(self) -> int:
        return sum(tensor.stride(0) * tensor.element_size() for tensor in self.tensors)

    def overwrite(self, ids: list[int]) -> None:
        """Change rows as FBGEMM does, without protection: -1 is none, out of range is row 0."""
        for row in ids:
            if row == -1 or not self.size:
                continue
            for tensor in self.tensors:
                tensor[row if 0 <= row < self.size else 0] += 1

    def stage(self, start: int, stop: int, row_start: int = 0) -> list[int]:
        """Stage all rows in a range, compare them with those of the cut, and return them."""
        return self.stage_rows([r for r in self.rows if start <= r < stop], row_start)

    def stage_rows(self, rows: list[int], row_start: int = 0) -> list[int]:
        positions = torch.tensor(rows, dtype=torch.int64)
        sizes = [8 * len(rows)] + [len(rows) * t.stride(0) * t.element_size() for t in self.tensors]
        offsets = np.cumsum([64] + [-(-size // 64) * 64 + 64 for size in sizes]).tolist()
        memory = torch.full((offsets[-1],), 173, dtype=torch.uint8)
        self.copies.stage(positions, row_start, memory, offsets[:-1])
        staged = [memory[at : at + size] for at, size in zip(offsets[:-1], sizes, strict=True)]
        assert staged[0].numpy().tobytes() == (positions + row_start).numpy().tobytes()
        self._compare(rows, [part.numpy().tobytes() for part in staged[1:]])
        for at, size in zip(offsets[:-1], sizes, strict=True):  # nothing is written beside them
            assert set(memory[at + size : at + size + 64].tolist()) <= {173}
        self.left -= set(rows)
        return rows

    def sample(self, rows: list[int]) -> None:
        found = self.copies.sample(torch.tensor(rows, dtype=torch.int64))
        self._compare(rows, [tensor.numpy().tobytes() for tensor in found])

    def _compare(self, rows: list[int], found: list[bytes]) -> None:
        at = torch.tensor(rows, dtype=torch.int64)
        assert found == [tensor[at].numpy().tobytes() for tensor in self.at_cut]


def tensors(size: int, seed: int = 0) -> list[torch.Tensor]:
    """Make tensors with rows of odd sizes."""
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, 3, generator=made),
        torch.randn(size, generator=made, dtype=torch.float64),
        torch.randint(0, 256, (size, 5), generator=made, dtype=torch.uint8),
        torch.randint(0, 9, (size, 1, 3), generator=made, dtype=torch.int16),
    ]


class Kernel:
    """A kernel of some shards, of which not all need to be protected.

    Args:
        feature_to_shard: which table each feature looks up.
        unprotected: places of shards that were copied at the cut.
    """

    def __init__(
        self,
        copies: RowCopies,
        shards: list[Shard],
        feature_to_shard: list[int],
        unprotected: Collection[int] = (),
    ) -> None:
        self.shards = shards
        self.feature_to_shard = feature_to_shard
        protected = {i: s.frozen for i, s in enumerate(shards) if i not in unprotected}
        self.copies = KernelCopies(copies, protected)
        for place, shard_copies in self.copies.shards.items():
            shards[place].copies = shard_copies

    def update(self, ids: list[list[int]], dtype: torch.dtype = torch.int64) -> None:
        """Train one step with the ids of each feature."""
        values = torch.tensor([i for of_feature in ids for i in of_feature], dtype=dtype)
        offsets = np.cumsum([0] + [len(of_feature) for of_feature in ids]).tolist()
        self.copies.before_update(values, offsets, self.feature_to_shard)
        for of_feature, shard in zip(ids, self.feature_to_shard, strict=True):
            self.shards[shard].overwrite(of_feature)

    def write(self, place: int, ids: list[int], dtype: torch.dtype = torch.int64) -> None:
        """Overwrite rows of one shard by hand."""
        self.copies.before_write(place, torch.tensor(ids, dtype=dtype))
        self.shards[place].overwrite(ids)


def one_shard(
    copies: RowCopies, size: int, rows: set[int] | None = None, width: int = 3
) -> tuple[Shard, Kernel]:
    """Make a kernel of one float table."""
    table = [torch.randn(size, width, generator=torch.Generator().manual_seed(size))]
    frozen = None if rows is None else frozen_bytes(rows, size)
    shard = Shard(copies, table, frozen, rows)
    return shard, Kernel(copies, [shard], [0])


def some_ids(chance: random.Random, size: int, most: int) -> list[int]:
    """Draw ids, some of them twice, -1 or out of range."""
    pool = [*range(size), -1, -1, -2, size, size + 7]
    return chance.choices(pool, k=chance.randint(0, most))
