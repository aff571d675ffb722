"""What a rank writes into a checkpoint, item by item, each made into bytes when its turn comes.

Rows are gathered and encoded only then, so that memory stays at a few chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.codecs import Settled
from torchrec_checknrun.codecs.quantization import Quantization, TableEncoding
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.format.chunk import EncodedChunk, state_chunk
from torchrec_checknrun.format.rank_file import Job
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.format.state import Tree, encode_state
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.save.digest import Digest, joint_digest
from torchrec_checknrun.save.snapshot import ShardSnapshot, Snapshot

Fingerprint = tuple[Mapping[str, bytes], Mapping[str, OptimizerClock]]


class Item(Protocol):
    """A part of a rank's plan."""

    def job(self, settled: Settled) -> Job:
        """What is to be written."""


@dataclass
class RowsItem:
    """Rows of one shard.

    Attributes:
        start, stop: those to be written among these rows, by position in the shard.
        count: how many that are.
    """

    shard: ShardSnapshot
    start: int
    stop: int
    count: int
    encoding: TableEncoding

    def positions(self) -> torch.Tensor:
        """The rows, by position in the shard, sorted, int64."""
        return self.shard.positions(self.start, self.stop)

    def job(self, settled: Settled) -> EncodedChunk:
        block = self.shard.shard.block(self.positions() + self.shard.shard.rectangle.row_start)
        return encode_rows(block, self.encoding.settled(settled))


@dataclass
class BlockItem:
    """A part of what this rank holds of a sharded tensor."""

    block: Block
    piece: Box

    def job(self, settled: Settled) -> EncodedChunk:
        return self.block.encode(self.piece)


@dataclass
class ChunkItem:
    """What is encoded already."""

    chunk: EncodedChunk

    def job(self, settled: Settled) -> EncodedChunk:
        return self.chunk


@dataclass
class Items:
    """All items of a snapshot.

    Attributes:
        by_name: in the order in which they are written: the small ones first.
        replicated: bytes of each state that all ranks have alike.
        trees: the same states, encoded, without their bytes.
        shared: by its number, the names of the pieces of each block that ranks of another mesh may
            hold as well, row-major.
    """

    by_name: dict[str, RowsItem | BlockItem | ChunkItem] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    shared: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, quantization: Quantization, chunk_bytes: int) -> Items:
        """Of a snapshot whose tables are live.

        Args:
            chunk_bytes: memory for all copies of a chunk that saving it makes, or restoring it.

        Raises:
            UnsupportedState: a state object holds what can't be stored, or two parts have one
                name.
        """
        items = cls()
        rank = dist.get_rank() if dist.is_initialized() else 0
        for name, value in snapshot.states.items():
            own = name in snapshot.per_rank
            tree, pieces = encode_state(value, name)
            if not own:
                items.replicated[name] = sum(memoryview(piece).nbytes for piece in pieces)
                items.trees[name] = tree
            chunk = state_chunk(name, rank if own else None, tree, pieces)
            items._add(state_key(name, rank if own else None), ChunkItem(chunk))
        for i, block in enumerate(snapshot.blocks):
            for number, piece in enumerate(block.pieces(chunk_bytes)):
                key = f"{block_key(i, rank)}{number}"
                items._add(key, BlockItem(block, piece))
                if block.elsewhere:
                    items.shared.setdefault(i, []).append(key)
        if snapshot.blocks and snapshot.collisions is not None:
            items._add(f"collisions@{rank}", ChunkItem(snapshot.collisions.encode(rank)))
        for shard in snapshot.shards:
            encoding = quantization.for_table(shard.shard.table, shard.shard.shape.rows)
            for number, (start, stop, count) in enumerate(shard.spans(chunk_bytes)):
                name = f"{shard.shard}#{number}"
                items._add(name, RowsItem(shard, start, stop, count, encoding))
        return items

    def _add(self, name: str, item: RowsItem | BlockItem | ChunkItem) -> None:
        if name in self.by_name:
            raise UnsupportedState(
                f"two parts of the checkpoint would be called {name!r}, and one of them would be "
                "lost: rename the table or the state object"
            )
        self.by_name[name] = item

    def digests(self) -> dict[str, Digest]:
        """Digest all items that are no table rows, by name."""
        return {
            name: Digest.of(item.job({}))
            for name, item in self.by_name.items()
            if not isinstance(item, RowsItem)
        }

    def shared_digest(self, number: int) -> str:
        """Digest the live values of a block that is ``shared``."""
        return joint_digest(self.by_name[name].job({}).encode() for name in self.shared[number])


def fingerprint(
    digests: Mapping[str, Digest], progress: Mapping[str, OptimizerClock]
) -> Fingerprint:
    """Tell by little what a checkpoint holds beside table rows, to see whether that has changed."""
    return {name: digest.whole for name, digest in digests.items()}, dict(progress)


def block_key(number: int, rank: int) -> str:
    """Begin the names of the items of a rank's block, by its place among the rank's blocks."""
    return f"block:{number}@{rank}#"


def state_key(name: str, rank: int | None = None) -> str:
    """Name the item of a state.

    Args:
        rank: whose own the state is; None: all ranks have it alike.
    """
    return f"state:{name}" if rank is None else f"state@{rank}:{name}"
