"""Restore everything beside table rows from an image, by the same way as from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from torchrec_checknrun.dense.state_objects import StateObjects
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import name_of
from torchrec_checknrun.format.row_chunk import RowForms
from torchrec_checknrun.memory.generators import set_generators
from torchrec_checknrun.memory.held_states import HeldStates, local_parts, replicas
from torchrec_checknrun.memory.model_content import part_name
from torchrec_checknrun.model.dense_states import DenseStates
from torchrec_checknrun.model.hand_written import announced
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.blocks import saved_blocks
from torchrec_checknrun.restore.collisions import check_held, resume_held
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.restore import Target, hand_back
from torchrec_checknrun.restore.states import (
    Owners,
    SavedStates,
    StateRestore,
    needed_states,
    present_states,
)
from torchrec_checknrun.values.state import decode_state, encode_state

_NAME = "the image"


class HeldRestore:
    """A restore of one rank's held states: call ``read`` and ``share``, then ``plan``, ``load`` and
    ``hand_back``.

    Attributes:
        optimizers: those whose live state ``plan`` makes fit; the caller undoes it on failure.
        began: whether anything else may have been changed; noted by the caller.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.began = False
        self.optimizers = DenseStates(target.model, target.states, target.tracked)

    def read(self, held: HeldStates) -> set[str]:
        """Take what this rank holds; return the replicated states of which it holds no value."""
        self._held = held
        names = self._target.replicated & held.trees.keys()
        return {name for name in names if _is_bare(decode_state(*held.trees[name]))}

    def share(self, ranks: Ranks, bare: Sequence[Collection[str]]) -> None:
        """Take the lowest rank's content of replicated states of which a rank holds no value: some
        objects show their state there alone; a collective.

        Args:
            bare: what ``read`` has returned on all ranks.
        """
        held = self._held
        if names := sorted(set().union(*bare) - set(bare[0])):
            shared = ranks.from_rank_0(lambda: {n: decode_state(*held.trees[n]) for n in names})
            for name in bare[ranks.rank] & shared.keys():
                tree, pieces = encode_state(shared[name], name)
                held.trees[name] = tree, memoryview(b"".join(pieces))

        def needed() -> set[str]:
            return needed_states(self._target.states, self.optimizers, self._saved)

        self._needed = set().union(*ranks.on_all_ranks(needed))

    @property
    def _saved(self) -> SavedStates:
        trees = self._held.trees
        return SavedStates(
            _NAME,
            dist.get_world_size() if dist.is_initialized() else 1,
            dict.fromkeys(trees, False),
            {name: {None: (name, tree)} for name, (tree, _) in trees.items()},
        )

    def plan(self) -> None:
        """Check what is held against the live objects; only the optimizers' state is changed.

        Raises:
            IncompatibleCheckpoint: it doesn't fit; names what.
        """
        target, tracked, held = self._target, self._target.tracked, self._held
        tracked.flush()
        assert target.model is not None
        live: dict[str, Any] = {MODEL: target.model.state_dict()}
        self._live = live
        others = {n: state for n, state in target.states.items() if n not in self.optimizers}
        saved = self._saved
        live.update(present_states(target.states, self.optimizers, saved, self._needed))
        owners = Owners({}, self.optimizers, objects=StateObjects(others), model=target.model)
        sharded = saved_blocks({name_of(header.path): header for header in held.sharded})
        self._states = StateRestore(saved, live, sharded, Fit(), owners)
        rows: dict[str, RowForms] = {
            table: {n: (t.dtype, t.dim() == 1) for n, t in tensors.items() if n != "weight"}
            for table, tensors in held.tables.items()
        }
        self._states.fit_optimizers({table: rows.get(table, {}) for table in tracked.tables})
        tracked.flush()
        stored, self._blocks = local_parts(live, tracked, self.optimizers)
        list(self._states.plan(stored, frozenset(), frozenset()))
        self._check()

    def load(self) -> None:
        """Write what is held into the live objects and state dicts."""
        held, tracked = self._held, self._target.tracked
        for name, (tree, payload) in held.trees.items():
            if name in self._live:
                self._states.put(name, decode_state(tree, payload))
        for block in self._blocks:
            block.tensor.copy_(held.parts[part_name(block)])
        resume_held(tracked.collisions, held.collisions)
        shards = [shard for shard in tracked.shards if shard.local.replicated]
        with announced([shard.kernel_module for shard in shards]):
            for shard in shards:
                shard.mark_all(everywhere=True)
                saved = held.tables[shard.table]
                for name, tensor in {"weight": shard.local.weight, **shard.local.optimizer}.items():
                    tensor.copy_(saved[name])

    def hand_back(self, ranks: Ranks) -> None:
        """Give the objects their content; a collective.

        Raises:
            ModelPartlyRestored: an object refused it.
        """
        hand_back(self._target, self.optimizers, self._live, self._held.progress, ranks)

    def set_generators(self) -> None:
        """Set the random number generators: last, since all else may draw from them."""
        if self._held.generators:  # a lost rank has none: it goes on as its program began
            set_generators(self._held.generators)

    def _check(self) -> None:
        held = self._held
        check_held(self._target.tracked.collisions, held.collisions, _NAME)
        for table in replicas(self._target.tracked):
            tensors = {"weight": table.weight, **table.optimizer}
            now = {n: tuple(t.shape) for n, t in tensors.items()}
            then = {n: tuple(t.shape) for n, t in held.tables.get(table.table, {}).items()}
            if now != then:
                raise IncompatibleCheckpoint(f"{_NAME} holds {then} of {table.table}, not {now}")
        names = {part_name(block): tuple(block.tensor.shape) for block in self._blocks}
        then = {name: tuple(tensor.shape) for name, tensor in held.parts.items()}
        if names != then:
            differing = sorted(set(names.items()) ^ set(then.items()))
            raise IncompatibleCheckpoint(f"{_NAME} holds other parts of tensors: {differing}")


def _is_bare(value: object) -> bool:
    """Return whether a state has no values, at most dicts and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and all(map(_is_bare, value))
