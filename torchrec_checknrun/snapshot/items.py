"""Items of a checkpoint: the parts that a rank writes, each encoded when its turn comes.

Rows are gathered and encoded only then, so that memory use stays at a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.codecs import Settled
from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.format.chunk import DECODED_BYTES, EncodedChunk, state_chunk
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.snapshot.digest import Digest, joint_digest
from torchrec_checknrun.snapshot.snapshot import ShardSnapshot, Snapshot
from torchrec_checknrun.values.state import Tree, encode_state
from torchrec_checknrun.values.tensor_bytes import RawViews

Fingerprint = tuple[Mapping[str, bytes], Mapping[str, OptimizerClock]]
"""See ``fingerprint``."""


class Item(Protocol):
    """A part of a rank's plan."""

    def job(self, settled: Settled) -> Job:
        """Return the chunk to write, or a job that encodes one."""


@dataclass
class RowsItem:
    """Rows of one shard.

    Attributes:
        start, stop: half-open range of positions in the shard; the item holds the rows to be
            written among these.
        count: number of the item's rows.
    """

    shard: ShardSnapshot
    start: int
    stop: int
    count: int
    encoding: TableEncoding

    def positions(self) -> torch.Tensor:
        """Return the rows' positions in the shard: ``(count,)`` int64, sorted."""
        return self.shard.positions(self.start, self.stop)

    def job(self, settled: Settled) -> EncodedChunk:
        block = self.shard.shard.block(self.positions() + self.shard.shard.rectangle.row_start)
        return encode_rows(block, self.encoding.settled(settled))


@dataclass
class BlockItem:
    """A piece of this rank's part of a sharded tensor."""

    block: Block
    piece: Box

    def job(self, settled: Settled) -> EncodedChunk:
        return self.block.encode(self.piece)


@dataclass
class ChunkItem:
    """A chunk that is encoded already."""

    chunk: EncodedChunk

    def job(self, settled: Settled) -> EncodedChunk:
        return self.chunk


@dataclass
class Items:
    """All items of a snapshot.

    Attributes:
        by_name: items by name, in writing order: the small ones first.
        replicated: bytes of each replicated state.
        trees: trees of the replicated states, without their bytes.
        copied_later: shards whose rows are copied behind training; ``find_rows`` makes their items.
        at_cut: the other shards.
        shared: names of the pieces, row-major, of each block that ranks of another mesh may hold as
            well; by the block's number.
    """

    by_name: dict[str, RowsItem | BlockItem | ChunkItem] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    shared: dict[int, list[str]] = field(default_factory=dict)
    at_cut: list[ShardSnapshot] = field(default_factory=list)
    copied_later: list[ShardSnapshot] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        quantization: Quantization,
        chunk_bytes: int,
        views: RawViews | None = None,
    ) -> Items:
        """Build the items of a live snapshot, but those of rows that are copied later.

        Args:
            chunk_bytes: memory for all copies of a chunk that a save or a restore makes.
            views: knows the bytes of lasting tensors from the last snapshot.

        Raises:
            UnsupportedState: a state object holds a value that can't be stored, or two parts have
                the same name.
        """
        items = cls()
        rank = dist.get_rank() if dist.is_initialized() else 0
        if views is not None:
            views.begin()
        for name, value in snapshot.states.items():
            own = name in snapshot.per_rank
            if (encoded := snapshot.encoded.get(name)) is None:
                encoded = encode_state(value, name, views if name in snapshot.lasting else None)
            tree, pieces = encoded
            chunk = state_chunk(name, rank if own else None, tree, pieces)
            if not own:
                items.replicated[name] = sum(chunk.sizes)
                items.trees[name] = tree
            items._add(state_key(name, rank if own else None), ChunkItem(chunk))
        for i, block in enumerate(snapshot.blocks):
            for number, piece in enumerate(block.pieces(chunk_bytes)):
                key = f"{block_key(i, rank)}{number}"
                items._add(key, BlockItem(block, piece))
                if block.elsewhere:
                    items.shared.setdefault(i, []).append(key)
        if snapshot.collisions is not None:
            items._add(f"collisions@{rank}", ChunkItem(snapshot.collisions.encode(rank)))
        at_cut = [shard for shard in snapshot.shards if not shard.later]
        items.copied_later = [shard for shard in snapshot.shards if shard.later]
        for name, item in _rows_items(at_cut, quantization, chunk_bytes):
            items._add(name, item)
        items.at_cut = at_cut
        return items

    def find_rows(self, quantization: Quantization, chunk_bytes: int) -> dict[str, RowsItem]:
        """Build the items of the rows that are copied later, which passes over marks; arguments as
        for ``of``.

        Raises:
            UnsupportedState: see ``of``.
        """
        found: dict[str, RowsItem] = {}
        for name, item in _rows_items(self.copied_later, quantization, chunk_bytes):
            if name in found or name in self.by_name:
                raise _twice(name)
            found[name] = item
        return found

    def _add(self, name: str, item: RowsItem | BlockItem | ChunkItem) -> None:
        if name in self.by_name:
            raise _twice(name)
        self.by_name[name] = item

    def digests(self) -> dict[str, Digest]:
        """Digest all items but table rows, by name."""
        found = {}
        for name, item in self.by_name.items():
            if not isinstance(item, RowsItem):
                chunk = item.job({})
                found[name] = Digest.of(chunk.entry, chunk.pieces)
                del chunk  # before the next one is made
        return found

    def shared_digest(self, number: int) -> str:
        """Digest the live values of a block that is ``shared``."""
        return joint_digest(
            self.by_name[name].job({}).encode().pieces for name in self.shared[number]
        )


def _rows_items(
    shards: Iterable[ShardSnapshot], quantization: Quantization, chunk_bytes: int
) -> Iterator[tuple[str, RowsItem]]:
    for shard in shards:
        encoding, most = shard.encoding(quantization), chunk_bytes
        if encoding.codec.at_once:  # a few bytes can stand for any number of equal rows
            most = min(most, DECODED_BYTES)
        for number, (start, stop, count) in enumerate(shard.spans(most)):
            name = f"{rows_key(shard.shard.name)}{number}"
            yield name, RowsItem(shard, start, stop, count, encoding)


def _twice(name: str) -> UnsupportedState:
    return UnsupportedState(
        f"two parts of the checkpoint would be called {name!r}, and one of them would be lost: "
        "rename the table or the state object"
    )


def fingerprint(
    digests: Mapping[str, Digest], progress: Mapping[str, OptimizerClock]
) -> Fingerprint:
    """Make a small fingerprint of a checkpoint's content beside table rows, to detect changes."""
    return {name: digest.whole for name, digest in digests.items()}, dict(progress)


def key_of(name: str) -> str:
    """Return the prefix of an item's name, of ``rows_key`` or ``block_key``; of others anything."""
    return name[: name.rfind("#") + 1]


def rows_key(shard: str) -> str:
    """Return the prefix of the item names of a shard's rows.

    Args:
        shard: its name.
    """
    return f"{shard}#"


def block_key(number: int, rank: int) -> str:
    """Return the prefix of the item names of a rank's block.

    Args:
        number: the block's place among the rank's blocks.
    """
    return f"block:{number}@{rank}#"


def state_key(name: str, rank: int | None = None) -> str:
    """Name the item of a state.

    Args:
        rank: the rank that owns the state; None: a replicated state.
    """
    return f"state:{name}" if rank is None else f"state@{rank}:{name}"
