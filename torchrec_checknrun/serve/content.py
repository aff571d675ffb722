"""Read what a plan asks for: chunk indexes once, chunks verified, the dense part of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.chunk import BlockHeader
from torchrec_checknrun.format.entries import StateEntry, difference_of
from torchrec_checknrun.format.manifest import Link, Manifest
from torchrec_checknrun.format.reader import (
    StoredChunk,
    coalesced_reads,
    dense_chunks,
    read_indexes,
    with_bases,
)
from torchrec_checknrun.restore.chunks import RowChunk, rows_by_table, table_problems
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.serve.inference.collisions import joined
from torchrec_checknrun.serve.plan import Plan
from torchrec_checknrun.store.coalescing import CoalescedReads
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.dense import MODEL, DenseReader, read_dense
from torchrec_checknrun.values.buffers import BUFFERS

_DENSE_BYTES = 256 << 20
"""Bytes of what lies beside rows to keep for the next version."""


class Indexes:
    """The chunk indexes of the checkpoints that were read last.

    Attributes:
        dense: reads the chunks beside rows, of one checkpoint after another.
    """

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._held: dict[Link, tuple[StoredChunk, ...]] = {}
        self._by_table: dict[Link, dict[str, list[RowChunk]]] = {}
        self.dense = DenseReader(root, _DENSE_BYTES, visible_seconds=0.0)

    def of(self, chain: Chain, place: int) -> tuple[StoredChunk, ...]:
        """Return the chunks of one of a chain's checkpoints, without waiting for missing files.

        Older indexes are read, too, where chunks are differences to the parent's.

        Raises:
            CorruptCheckpoint: an index is missing or damaged, or doesn't fit the manifest.
        """
        found: list[tuple[Manifest, tuple[StoredChunk, ...]]] = []
        for manifest in reversed(chain.manifests[: place + 1]):
            if manifest.link in self._held:
                break
            chunks = read_indexes(self._root, manifest, 0.0)
            for problem in table_problems(manifest, chunks):
                raise CorruptCheckpoint(problem)
            found.append((manifest, chunks))
            if not any(difference_of(chunk.entry) for chunk in chunks):
                break
        for manifest, chunks in reversed(found):
            parent = manifest.parent
            parents = dense_chunks(self._held[parent]) if parent in self._held else {}
            self._held[manifest.link] = with_bases(manifest, chunks, parents)
        return self._held[chain.manifests[place].link]

    def rows_of(self, chain: Chain, place: int) -> Mapping[str, list[RowChunk]]:
        """Return the chunks of rows of one of a chain's checkpoints, by table; see ``of``."""
        link = chain.manifests[place].link
        if link not in self._by_table:
            self._by_table[link] = rows_by_table(self.of(chain, place))
        return self._by_table[link]

    def keep(self, manifests: tuple[Manifest, ...]) -> None:
        """Forget the indexes of all other checkpoints."""
        links = {manifest.link for manifest in manifests}
        self._held = {link: chunks for link, chunks in self._held.items() if link in links}
        self._by_table = {link: rows for link, rows in self._by_table.items() if link in links}


class Content:
    """The chunks of a plan.

    Attributes:
        plan: the part of a chain to read.
        bytes_read: of chunks, so far.
        each: called before each index and chunk is read.
    """

    def __init__(self, root: Folder, plan: Plan, indexes: Indexes) -> None:
        self.root = root
        self._indexes = indexes
        self.plan = plan
        self.bytes_read = 0
        self.each: Callable[[], object] = lambda: None
        self._reads: CoalescedReads | None = None

    @property
    def _first(self) -> int:
        """Return the place of the oldest checkpoint to read."""
        return self.plan.common if self.plan.follows else 0

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the files that the plan may read."""
        manifests = self.plan.chain.manifests[self._first :]
        return sum(manifest.stored_bytes for manifest in manifests)

    @property
    def head(self) -> Manifest:
        """Return the chain's newest checkpoint."""
        return self.plan.chain.head

    def read(self, chunk: StoredChunk) -> memoryview:
        """Return a chunk's bytes, verified.

        Raises:
            CorruptCheckpoint: the bytes are missing or not those that were written.
        """
        self.each()
        dense = self._indexes.dense
        before = dense.bytes_read
        if self._reads is None:
            places = range(self._first, len(self.plan.chain.manifests))
            chunks = (chunk for place in places for chunk in self.chunks_of(place))
            self._reads = coalesced_reads(self.root, chunks)
        content = dense.read(chunk, self._reads.part)
        self.bytes_read += dense.bytes_read - before
        return content

    def chunks_of(self, place: int) -> tuple[StoredChunk, ...]:
        """Return all chunks of one of the chain's checkpoints."""
        return self._indexes.of(self.plan.chain, place)

    @property
    def _newest(self) -> tuple[StoredChunk, ...]:
        return self.chunks_of(len(self.plan.chain.manifests) - 1)

    def rows_of(self, place: int, table: str) -> Sequence[RowChunk]:
        """Return a table's chunks of one of the chain's checkpoints."""
        return self._indexes.rows_of(self.plan.chain, place).get(table, ())

    def rows(self, table: str, first: int = 0) -> Iterator[tuple[int, RowChunk]]:
        """Yield a table's chunks, the newest checkpoint's first, each with the checkpoint's place.

        Args:
            first: the place of the oldest checkpoint to look into.
        """
        for place in range(len(self.plan.chain.manifests) - 1, first - 1, -1):
            for chunk in self.rows_of(place, table):
                yield place, chunk

    def check(self) -> None:
        """Read and check the indexes of all checkpoints that have to be read.

        Raises:
            CorruptCheckpoint: an index is missing or damaged.
        """
        for place in range(self._first, len(self.plan.chain.manifests)):
            self.each()
            self.chunks_of(place)

    def dense(self) -> dict[str, torch.Tensor]:
        """Read the dense part of the model that the chain's head has, by name.

        Raises:
            CorruptCheckpoint: a chunk is damaged.
        """
        wanted = (MODEL, BUFFERS)
        chunks = tuple(
            chunk
            for chunk in self._newest
            if (isinstance(chunk.entry, StateEntry) and chunk.entry.name in wanted)
            or (isinstance(chunk.header, BlockHeader) and chunk.header.path[0] == MODEL)
        )
        found = read_dense(self.root, chunks, self.read)
        prefix = f"{BUFFERS}.rank0."
        if self.head.world_size == 1:
            found |= {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        return joined({name: v for name, v in found.items() if isinstance(v, torch.Tensor)})
