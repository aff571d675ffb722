"""Hold everything of a rank beside the rows of sharded tables, as of the end of one step.

It is what a checkpoint stores of it, in the same encoding, but whole on every rank: each rank's own
buffers and replicas, data-parallel tables with their optimizer rows, local parts of sharded
tensors, the optimizers' clocks, and the random number generators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.dense.generators import generators_state
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.state import Tree, decode_state, encode_state, tree_items
from torchrec_checknrun.memory.file import NoImage
from torchrec_checknrun.memory.header import Piece
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.progress import OptimizerClock
from torchrec_checknrun.model.state_dict import StoredTables, drop_tables, find_blocks
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.snapshot.snapshot import live_states

_STATES, _TABLES, _PARTS, _PROGRESS, _GENERATORS = (
    "states",
    "tables",
    "parts",
    "progress",
    "generators",
)


def local_parts(
    live: dict[str, Any], tracked: TrackedModel, optimizers: Any = ()
) -> tuple[StoredTables, list[Block]]:
    """Find the local parts of sharded tensors beside tables; also return the tables."""
    stored = StoredTables(tracked.tables, [shard.local for shard in tracked.shards])
    return stored, find_blocks(live, stored, optimizers)


def replicas(tracked: TrackedModel) -> list[LocalShard]:
    """Return the data-parallel tables, which dense optimizers step, with their present state."""
    shards = [shard for shard in tracked.shards if shard.local.replicated]
    for watch in dict.fromkeys(shard.writes for shard in shards):
        watch.flush()  # an optimizer makes its state at its first step, or replaces it when loaded
    return [shard.local for shard in shards]


def take(model: nn.Module, tracked: TrackedModel, states: Mapping[str, Stateful]) -> list[Piece]:
    """Return this rank's state as pieces to be written, which share live memory where possible.

    Raises:
        UnsupportedState, SaveFailed: a state can't be stored.
    """
    live, optimizers = live_states(model, tracked, states)
    stored, blocks = local_parts(live, tracked, optimizers)
    content = {
        _STATES: {name: drop_tables(value, stored) for name, value in live.items()},
        _TABLES: {
            table.table: dict(zip(("weight", *table.optimizer), table.tensors, strict=True))
            for table in replicas(tracked)
        },
        _PARTS: [{"name": part_name(block), "value": block.tensor} for block in blocks],
        _PROGRESS: {table: asdict(clock) for table, clock in tracked.progress().items()},
        _GENERATORS: generators_state(),
    }
    tree, pieces = encode_state(content, "image")
    data = msgspec.json.encode(tree)
    padding = bytes(-len(data) % 64)
    size = len(data) + len(padding)
    flat = [p if isinstance(p, bytes) else p.cast("B") for p in pieces]
    return [size.to_bytes(64, "little"), data, padding, *flat]


def size_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes of pieces."""
    return sum(len(piece) for piece in pieces)


def part_name(block: Block) -> str:
    """Name a local part of a sharded tensor."""
    return f"{block.path!r} {block.box.spans!r}"


@dataclass(frozen=True)
class HeldStates:
    """A rank's state as of the end of one step.

    Attributes:
        payload: the bytes that trees point into; in shared memory.
        trees: of the state objects and the model, by name.
        tables: data-parallel tables' weight and optimizer rows, by table.
        parts: local parts of sharded tensors, by name.
        progress: the optimizers' clocks, by table.
        generators: see ``generators_state``.
    """

    payload: memoryview
    trees: dict[str, Tree]
    tables: dict[str, dict[str, torch.Tensor]]
    parts: dict[str, torch.Tensor]
    progress: dict[str, OptimizerClock]
    generators: dict[str, Any]

    @classmethod
    def read(cls, content: memoryview) -> HeldStates:
        """Read what ``take`` has returned.

        Raises:
            NoImage: it is something else.
        """
        try:
            size = int.from_bytes(content[:64], "little")
            tree: Tree = msgspec.json.decode(bytes(content[64 : 64 + size]).rstrip(b"\0"))
            payload = content[64 + size :]
            items = tree_items(tree)
            found = {name: decode_state(items[name], payload) for name in items if name != _STATES}
            return cls(
                payload=payload,
                trees={str(name): node for name, node in tree_items(items[_STATES]).items()},
                tables=found[_TABLES],
                parts={part["name"]: part["value"] for part in found[_PARTS]},
                progress={table: OptimizerClock(**c) for table, c in found[_PROGRESS].items()},
                generators=found[_GENERATORS],
            )
        except (CorruptCheckpoint, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise NoImage(f"its state can't be read ({error!r})") from None
