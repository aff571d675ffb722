"""Find the model's part of a checkpoint beside table rows, without asking for it each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as Kernel,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.format.state_tree import leaves
from torchrec_checknrun.model.blocks import Block, whole_block
from torchrec_checknrun.model.module_tree import ModuleTree
from torchrec_checknrun.model.state_dict import MODEL, StoredTables, drop_tables, find_blocks
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.values.buffers import buffer_names
from torchrec_checknrun.values.dense import require_dense
from torchrec_checknrun.values.own_loading import is_extra_state
from torchrec_checknrun.values.state import Tree, encode_state

if TYPE_CHECKING:
    from torchrec_checknrun.model.tracked import TrackedModel


@dataclass(frozen=True)
class DensePart:
    """A model's state dict apart from tables. Don't change it: it may be returned again.

    Attributes:
        model: the model.
        dense: its values by name, under names that all ranks have; live tensors.
        of_some: its tensors under names that some ranks lack.
        parts: this rank's parts of sharded tensors other than tables.
    """

    model: nn.Module
    dense: dict[str, Any]
    of_some: dict[str, torch.Tensor]
    parts: list[Block]

    def require_restorable(self) -> None:
        """Refuse values that no restore could give back to the model.

        Raises:
            UnsupportedState: a value is neither a tensor nor a module's extra state.
        """
        for name, value in self.dense.items():
            if not (isinstance(value, torch.Tensor) or is_extra_state(name)):
                raise UnsupportedState(
                    f"the model's state dict has {name!r}, a {type(value).__name__}, which can't "
                    "be restored into the model: put it into a state object of its own, or let "
                    "get_extra_state() return it"
                )

    @cached_property
    def blocks(self) -> list[Block]:
        """Return the values stored apart from those of all ranks: ``parts`` and ``of_some``.

        Raises:
            UnsupportedState: a tensor can't be stored.
        """
        whole = [whole_block((MODEL, name), tensor) for name, tensor in self.of_some.items()]
        return [*self.parts, *whole]

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Return the names of the model's buffers among the values."""
        return buffer_names(self.model, self.dense) | self.broadcast

    @cached_property
    def broadcast(self) -> frozenset[str]:
        """Return the names of the buffers that DistributedDataParallel makes alike before use."""
        wrapped = [m for m in self.model.modules() if isinstance(m, DistributedDataParallel)]
        synced = [buffer_names(m, self.dense) for m in wrapped if m.broadcast_buffers]
        return frozenset(chain.from_iterable(synced))

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        """Return the values that only optimizers' steps change: no buffers, no extra state, which
        modules change themselves, and no memory of FBGEMM's modules, whose backward pass updates.

        Raises:
            UnsupportedState: a value is no tensor.
        """
        self.require_restorable()
        fused = (m for m in self.model.modules() if isinstance(m, Kernel))
        in_backward = {tensor.data_ptr() for m in fused for tensor in m.parameters()}
        return [
            value
            for name, value in self.dense.items()
            if not (name in self.buffers or is_extra_state(name))
            and value.data_ptr() not in in_backward
        ]

    @cached_property
    def encoded(self) -> tuple[Tree, list[bytes | memoryview]]:
        """Return the values encoded, see ``encode_state``; their bytes are the live memory if the
        part is kept for the next checkpoint.

        Raises:
            UnsupportedState: a value can't be stored.
        """
        return encode_state(self.dense, MODEL)

    @cached_property
    def names(self) -> dict[torch.Tensor, str]:
        """Return the names of the model's parameters."""
        return {parameter: name for name, parameter in self.model.named_parameters()}


class DenseModel:
    """A model's state beside table rows, the same object as long as nothing was replaced.

    Where the state dict is more than the model's own tensors (a user's hooks, extra state), the
    model is asked each time.

    Args:
        tracked: knows the tables, which are left out.
        tree: notices what was replaced in the model.

    Attributes:
        of_some: names of tensors that some ranks have, and others lack; see ``agree``.
    """

    def __init__(self, model: nn.Module, tracked: TrackedModel, tree: ModuleTree) -> None:
        self._model, self._tracked, self._tree = model, tracked, tree
        self.of_some: frozenset[str] = frozenset()
        self._found: DensePart | None = None
        self._generation = 0
        self._stored = StoredTables((), ())
        self._stored_at: tuple[int, ...] | None = None

    def find(self, refreshed: bool = False) -> DensePart:
        """Return the state as it is now.

        Args:
            refreshed: nothing can have been replaced since the tree was last asked.

        Raises:
            UnsupportedState: see ``find_blocks``.
        """
        if self._found is not None:
            now = self._tree.latest if refreshed else self._tree.generation()
            if now == self._generation:
                return self._found
        live = {MODEL: self._model.state_dict()}
        stored = self.stored()
        dense = drop_tables(live[MODEL], stored)
        for name, value in dense.items():
            if isinstance(value, torch.Tensor):
                require_dense(value, f"{MODEL}.{name}")
        of_some = {name: dense.pop(name) for name in sorted(self.of_some & dense.keys())}
        found = DensePart(self._model, dense, of_some, find_blocks(live, stored))
        self._generation = self._tree.generation()
        self._found = found if self._may_be_kept(found) else None
        return found

    def agree(self, ranks: Ranks) -> None:
        """Find the tensors under names that some ranks lack, to be stored apart; a collective.

        One table's state may be a buffer of the rank that holds the table, and a module may be that
        of a single rank.

        Raises:
            UnsupportedState: see ``find`` and ``DensePart.require_restorable``; or some ranks lack
                extra state that is no tensor.
        """

        def all_names() -> tuple[frozenset[str], frozenset[str]]:
            part = self.find()
            part.require_restorable()
            others = {n: v for n, v in part.dense.items() if not isinstance(v, torch.Tensor)}
            encode_state(others, MODEL)  # refuses at the start what no save could store
            return frozenset(part.dense), frozenset(others)

        names, others = zip(*ranks.on_all_ranks(all_names), strict=True)
        self.of_some = frozenset().union(*names) - frozenset.intersection(*names)
        if apart := sorted(self.of_some & frozenset().union(*others)):
            raise UnsupportedState(
                f"the model's extra state {apart[0]!r} is no tensor, and not that of all ranks: "
                "let get_extra_state() return a tensor, or put it into a state object of its own "
                "that is PerRank"
            )
        self._found = None

    def stored(self) -> StoredTables:
        """Return the names and memory of the tables, found again if shards or their memory are
        others than the last time.
        """
        tracked, at = self._tracked, self._tracked.places()
        if at is None or at != self._stored_at:
            shards = [shard.local for shard in tracked.shards]
            self._stored, self._stored_at = StoredTables(tracked.tables, shards), at
        return self._stored

    def _may_be_kept(self, found: DensePart) -> bool:
        if not all(isinstance(value, torch.Tensor) for value in found.dense.values()):
            return False
        tensors = [tensor for _, tensor in leaves(found.dense, (torch.Tensor,))]
        tensors += [*found.of_some.values(), *(block.tensor for block in found.parts)]
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
            return False  # shown by a copy
        return self._tree.holds(tensors) and self._tree.has_plain_state_dict()
