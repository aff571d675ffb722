"""Hold everything of a rank beside the rows of sharded tables, as of the end of one step.

The content is what a checkpoint stores of it, in the same encoding, but whole on every rank: each
rank's own buffers and replicas, data-parallel tables with their optimizer rows, local parts of
sharded tensors, the optimizers' clocks, and the random number generators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint, ImagesRefused, SaveFailed
from torchrec_checknrun.format.chunk import BlockHeader, dtype_name
from torchrec_checknrun.format.entries import Facts
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.memory.generators import Generators, generators_state
from torchrec_checknrun.memory.model_content import (
    PARTS,
    STATES,
    ModelContent,
    parts_of,
    read_section,
    section,
)
from torchrec_checknrun.memory.optimizer_content import OptimizerContent
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.collisions import CollisionState
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.progress import Clocks, OptimizerClock, by_table
from torchrec_checknrun.model.state_dict import StoredTables, drop_tables, find_blocks
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.shards import LocalShard
from torchrec_checknrun.shared_memory.file import NoImage
from torchrec_checknrun.shared_memory.header import Piece
from torchrec_checknrun.snapshot.snapshot import state_dicts
from torchrec_checknrun.values.state import (
    SHARDED,
    TORCH_DTYPES,
    Tree,
    decode_state,
    tree_items,
)

_TABLES, _PROGRESS, _GENERATORS = "tables", "progress", "generators"
_COLLISIONS, _FACTS = "collisions", "collision facts"
_SHARDED = "sharded"
_NONE = msgspec.msgpack.encode({})


def local_parts(
    live: dict[str, Any], tracked: TrackedModel, optimizers: Any = ()
) -> tuple[StoredTables, list[Block]]:
    """Find the local parts of sharded tensors beside tables; also return the tables."""
    stored = StoredTables(tracked.tables, [shard.local for shard in tracked.shards])
    return stored, find_blocks(live, stored, optimizers)


def _sharded(live: dict[str, Any], stored: StoredTables) -> list[dict[str, Any]]:
    """Describe the sharded tensors of states, of which this rank may have no part: a new process's
    optimizer must make them.
    """
    return [
        {"path": path, "dtype": dtype_name(leaf.dtype), "size": tuple(leaf.size())}
        for path, leaf in leaves(live, SHARDED)
        if not any(map(stored.name, path[-2:]))  # a table's state comes with its rows
    ]


def _header(sharded: dict[str, Any]) -> BlockHeader:
    whole = Box.whole(sharded["size"])
    dtype = TORCH_DTYPES[sharded["dtype"]]
    return BlockHeader(sharded["path"], dtype, sharded["size"], whole, whole)


def replicas(tracked: TrackedModel) -> list[LocalShard]:
    """Return the data-parallel tables, which dense optimizers step, with their present state."""
    for watch in dict.fromkeys(shard.writes for shard in tracked.replicas):
        watch.flush()  # an optimizer makes its state at its first step, or replaces it when loaded
    return [shard.local for shard in tracked.replicas]


class Taker:
    """Takes a rank's state at the end of each step.

    Args:
        states: the state objects by name.
    """

    def __init__(
        self, model: nn.Module, tracked: TrackedModel, states: Mapping[str, Stateful]
    ) -> None:
        self._tracked, self._states = tracked, states
        self._content = ModelContent(tracked.dense)
        self._optimizers = DenseStates(model, states, tracked, self._content.names)
        self._kept = {
            name: OptimizerContent(name, states[name], partial(self._optimizer, name))
            for name in self._optimizers
        }
        self._generators = Generators(lambda state: section({_GENERATORS: state}))

    def take(self) -> list[Piece]:
        """Return the state as pieces to be written, which share live memory where possible.

        Raises:
            UnsupportedState, SaveFailed: a state can't be stored.
        """
        return [*self._beside_generators(), *self._generators.now()]

    def ask(self) -> None:
        """Ask the state objects where nothing is kept of it: some talk to the other ranks then,
        which go on asking.
        """
        with suppress(SaveFailed):
            state_dicts(self._states, self._kept)

    def _beside_generators(self) -> list[Piece]:
        """Return the pieces of all but the random number generators' state, which comes last."""
        pieces = [*self._content.pieces()]
        asked = []
        for name, content in self._kept.items():
            if (kept := content.pieces()) is not None:
                pieces += kept
            else:
                asked.append(name)
        tables = {
            table.table: dict(zip(("weight", *table.optimizer), table.tensors, strict=True))
            for table in replicas(self._tracked)
        }
        collisions = self._tracked.collisions.state()
        of_run = _of_run(tables, self._tracked.clocks(), collisions)
        return [*pieces, *section({**self._asked(asked), **of_run})]

    def _asked(self, names: Collection[str]) -> dict[str, Any]:
        """Return the state objects' content: of optimizers those with these names."""
        optimizers = self._optimizers.stored(names)
        live = {**optimizers, **state_dicts(self._states, self._kept)}
        if not live:
            return {}
        stored, blocks = local_parts(live, self._tracked, optimizers)
        states = {n: drop_tables(v, stored, n not in optimizers) for n, v in live.items()}
        return {STATES: states, PARTS: parts_of(blocks), _SHARDED: _sharded(live, stored)}

    def _optimizer(self, name: str) -> Any:
        """Return the content of an optimizer that has no parts of sharded tensors."""
        found = self._asked([name])
        return found[STATES][name]

    def is_present(self, content: memoryview) -> bool:
        """Tell whether what ``take`` has returned is the state as it is now, generators aside: an
        evaluation draws from these, too.

        Raises:
            UnsupportedState, SaveFailed: a state can't be stored.
        """
        at = 0
        for piece in self._beside_generators():
            held = np.frombuffer(content[at : at + piece.nbytes], np.uint8)
            if not np.array_equal(held, piece.numpy()):
                return False
            at += piece.nbytes
        return True


def size_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes of pieces."""
    return sum(map(torch.Tensor.numel, pieces))


def require_few(pieces: Sequence[Piece], most: int, seconds: float) -> None:
    """Refuse to copy too much state at every step.

    Args:
        most: bytes that the user allows.
        seconds: how long it took to find the pieces.

    Raises:
        ImagesRefused: there are more bytes.
    """
    size = size_of(pieces)
    if size > most:
        raise ImagesRefused(
            f"every step would copy {size:,} bytes of state beside the tables into the image "
            f"(to find them took {seconds * 1e3:.1f} ms), more than most_state_bytes={most:,}: "
            "raise that limit if the step has the time, or run without survive=Images()"
        )


def _of_run(
    tables: dict[str, dict[str, torch.Tensor]],
    clocks: Clocks,
    collisions: CollisionState | None,
) -> dict[str, object]:
    """Return what is held beside states, see ``HeldStates``."""
    packed = [{"tables": names, "clock": asdict(clock)} for names, clock in clocks]
    progress = msgspec.msgpack.encode(packed)
    return {_TABLES: tables, _PROGRESS: progress, **_of_collisions(collisions)}


def _of_collisions(state: CollisionState | None) -> dict[str, object]:
    """Return what is held of managed-collision modules beside tensors of the model."""
    if state is None:
        return {}
    return {_FACTS: msgspec.msgpack.encode(state.facts), _COLLISIONS: state.tensors}


@dataclass(frozen=True)
class HeldStates:
    """A rank's state as of the end of one step.

    Attributes:
        trees: of the state objects and the model, by name, each with the payload it points into;
            that is shared memory.
        tables: data-parallel tables' weight and optimizer rows, by table.
        parts: local parts of sharded tensors, by name.
        sharded: the sharded tensors of the state objects, as if whole.
        progress: the optimizers' clocks, by table.
        generators: see ``generators_state``.
        collisions: of managed-collision modules, beside their parts.
    """

    trees: dict[str, tuple[Tree, memoryview]]
    tables: dict[str, dict[str, torch.Tensor]]
    parts: dict[str, torch.Tensor]
    sharded: list[BlockHeader]
    progress: dict[str, OptimizerClock]
    generators: dict[str, Any]
    collisions: CollisionState

    @classmethod
    def read(cls, content: memoryview) -> HeldStates:
        """Read what ``Taker.take`` has returned.

        Raises:
            NoImage: it is something else.
        """
        try:
            trees: dict[str, tuple[Tree, memoryview]] = {}
            parts: dict[str, torch.Tensor] = {}
            sharded: list[BlockHeader] = []
            found: dict[Any, Any] = {}
            while content:
                tree, payload, content = read_section(content)
                items = tree_items(tree)
                states = tree_items(items.pop(STATES, None))
                trees |= {str(name): (node, payload) for name, node in states.items()}
                own = {name: decode_state(node, payload) for name, node in items.items()}
                parts |= {part["name"]: part["value"] for part in own.get(PARTS, ())}
                sharded += map(_header, own.get(_SHARDED, ()))
                found |= own
            packed = msgspec.msgpack.decode(found[_PROGRESS])
            clocks = [(each["tables"], OptimizerClock(**each["clock"])) for each in packed]
            facts = msgspec.msgpack.decode(found.get(_FACTS, _NONE), type=dict[str, Facts])
            collisions = CollisionState(facts, found.get(_COLLISIONS, {}))
            of_run = by_table(clocks), found[_GENERATORS], collisions
            return cls(trees, found[_TABLES], parts, sharded, *of_run)
        except (
            *(CorruptCheckpoint, msgspec.MsgspecError),
            *(KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError),
        ) as error:
            raise NoImage(f"its state can't be read ({error!r})") from None

    def pieces(self) -> list[Piece]:
        """Return the pieces that ``read`` reads, with this rank's present generators: where no
        object may be asked, since the other ranks' are not. There are no ``parts``.
        """
        states = {name: decode_state(*tree) for name, tree in self.trees.items()}
        clocks = [([table], clock) for table, clock in self.progress.items()]
        of_run = _of_run(self.tables, clocks, self.collisions)
        generators = {_GENERATORS: generators_state()}
        return [*section({STATES: states, **of_run}), *section(generators)]
