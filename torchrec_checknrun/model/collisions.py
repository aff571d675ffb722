"""Collect the state of managed-collision modules (zero-collision hashing) beside the state dict.

The remapping tables are blocks. But a module also keeps the ids seen since its last eviction and
counts the steps to the next one: without them a restored run would evict at other steps, and other
ids, than an uninterrupted one. Raw ids are distributed over the ranks by value, so remapping tables
can't be cut elsewhere for another number of ranks. The checks of a restore are in
``restore/collisions.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.format.chunk import EncodedChunk, Path
from torchrec_checknrun.format.entries import CollisionsEntry, Facts
from torchrec_checknrun.model.module_tree import find_modules
from torchrec_checknrun.values.state import encode_state

NAME = "managed collisions"
"""The chunk's name in index entries and errors."""

Tensors = dict[str, torch.Tensor]
COLLECTION = "_managed_collision_collection."
MODULES = "_managed_collision_modules."
"""Parts of a module's state-dict path."""
RAW_IDS = frozenset({"_mch_sorted_raw_ids", "_hash_zch_identities"})
"""The buffer with the raw ids, of each kind of module. The import of TorchRec's own name for the
second would make every import of this package longer by a tenth.
"""


@dataclass
class CollisionState:
    """The state of all managed-collision modules of a rank.

    Attributes:
        facts: by the module's state-dict path.
        tensors: by the same path, the ids and counts collected since the last eviction.
    """

    facts: dict[str, Facts]
    tensors: dict[str, Tensors]

    def encode(self, rank: int) -> EncodedChunk:
        """Encode the state as a chunk, whose pieces share the live memory where possible."""
        tree, pieces = encode_state(self.tensors, NAME)
        return EncodedChunk(
            CollisionsEntry(name=NAME, rank=rank, modules=self.facts, tree=tree), pieces
        )


def facts_of(module: ManagedCollisionModule, rows: Span) -> Facts:
    """Return the index entry's facts about a live module that maps ids to these rows."""
    if not isinstance(module, MCHManagedCollisionModule):
        return Facts(rows, module.input_size(), module.buckets())
    return Facts(
        rows,
        module.input_size(),
        None,
        module._eviction_interval,
        module._current_iter,
        module._last_eviction_iter,
        module._input_history_buffer_size,
    )


class Collisions:
    """The managed-collision modules of a sharded model.

    Attributes:
        modules: by state-dict path.
        rows: by path, the rows of its table that the module maps ids to.
        whole: paths of modules that are not sharded, as beside a collection that is sharded without
            them; each rank has its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, ManagedCollisionModule] = {}
        self.rows: dict[str, Span] = {}
        self.whole: set[str] = set()
        kinds = (ShardedManagedCollisionCollection, MCHManagedCollisionModule)
        for path, collection in find_modules(model, kinds):
            if isinstance(collection, MCHManagedCollisionModule):
                self.modules[path] = collection
                self.rows[path] = (0, collection.output_size())
                self.whole.add(path)
                continue
            prefix = f"{path}.{MODULES}" if path else MODULES
            for table, module in collection._managed_collision_modules.items():
                start, rows, _ = collection._mc_module_name_shard_metadata[table]
                self.modules[prefix + table] = module
                self.rows[prefix + table] = (start, start + rows)

    def state(self) -> CollisionState | None:
        """Return the modules' present facts and histories; None if there are no modules."""
        if not self.modules:
            return None
        return CollisionState(
            {path: facts_of(module, self.rows[path]) for path, module in self.modules.items()},
            {path: _history(module) for path, module in self.modules.items()},
        )


def is_averaged(path: Path, value: object) -> bool:
    """Return whether several sharding groups hold a module's tensor (two-dimensional parallelism).

    Args:
        path: of the tensor in the state dict.
        value: the tensor, if it is sharded.
    """
    return (
        isinstance(value, ShardedTensor)
        and MODULES in str(path[-1])
        and dist.get_world_size(value._process_group) < dist.get_world_size()
    )


def _history(module: ManagedCollisionModule) -> Tensors:
    """Return the ids seen since the last eviction, ``(n,)``, and the metadata of each id."""
    if not isinstance(module, MCHManagedCollisionModule) or module._input_history_buffer_size < 0:
        return {}
    count = module._current_history_buffer_offset
    history = {name: kept[:count] for name, kept in module._history_metadata.items()}
    return {**history, "ids": module._history_accumulator[:count]}
