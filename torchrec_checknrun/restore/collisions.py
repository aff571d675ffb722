"""Restore managed-collision modules (TorchRec's remapping of raw ids to rows).

A module's remapping table is restored as blocks. Raw ids belong to ranks by their value, so a plan
is refused under which a restored table would lie on the wrong rank; and after the restore each
module continues with its saved history of ids and its iteration counters.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import decode_state_chunk
from torchrec_checknrun.format.entries import CollisionsEntry, Facts
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.collisions import (
    COLLECTION,
    MODULES,
    NAME,
    RAW_IDS,
    Collisions,
    CollisionState,
    Tensors,
    facts_of,
)

logger = logging.getLogger(__name__)


@dataclass
class _Part:
    """One saved rank's state of a module."""

    rank: int
    facts: Facts
    tensors: Tensors = field(default_factory=dict)


class CollisionRestore:
    """A restore of managed-collision modules beside their tensors.

    Args:
        collisions: the model's modules; None if only its state dict is known.
    """

    def __init__(self, collisions: Collisions | None) -> None:
        self._modules = collisions.modules if collisions is not None else {}
        self._rows = collisions.rows if collisions is not None else {}
        self._whole = collisions.whole if collisions is not None else set()
        self._parts: dict[str, list[_Part]] = {}
        self._regrouped: set[str] = set()
        self._segments: dict[str, torch.Tensor] = {}

    def plan(
        self,
        entries: Mapping[str, CollisionsEntry],
        blocks: Iterable[tuple[Block, tuple[Span, ...]]],
        tensors: Container[str],
        where: str,
    ) -> list[str]:
        """Check every module whose raw ids are among the blocks, or the other tensors.

        Args:
            entries: index entries of the modules' chunks, by the name of the chunk.
            blocks: the blocks to restore, with the rows of the saved shards.
            tensors: state-dict names of all tensors to restore.
            where: the checkpoint's name in errors.

        Returns:
            The names of the chunks to read.

        Raises:
            IncompatibleCheckpoint: a module can't be restored on these ranks; names the module, and
                the remedy.
        """
        needed = set()
        for block, saved in blocks:
            path, _, buffer = str(block.path[-1]).rpartition(".")
            if buffer not in RAW_IDS:
                continue
            own = block.rows
            module = self._modules.get(path)
            layout = (own,) if path in self._whole else block.layout
            if buffer == "_mch_sorted_raw_ids" and layout != saved:
                _check_layout(path, module, own, layout, saved)
                self._regrouped.add(path)
            if module is None:
                continue
            self._parts[path] = []
            lowest: set[Span] = set()  # of ranks that hold the same rows, of other sharding groups
            for name, entry in sorted(entries.items(), key=lambda item: item[1].rank):
                facts = entry.modules.get(path)
                if facts is None or facts.rows in lowest:
                    continue
                lowest.add(facts.rows)
                _check_facts(path, facts, facts_of(module, own), where)
                if own[0] <= facts.rows[0] and facts.rows[1] <= own[1]:
                    self._parts[path].append(_Part(entry.rank, facts))
                    needed.add(name)
            if isinstance(module, MCHManagedCollisionModule):
                self._segments[path] = module._output_segments_tensor.clone()
        needed |= self._plan_others(entries, tensors, where)
        return sorted(needed)

    def _plan_others(
        self, entries: Mapping[str, CollisionsEntry], tensors: Container[str], where: str
    ) -> set[str]:
        """Check the modules that were not sharded, each with the part of the same rank, or with the
        lowest rank's; return the names of the chunks to read.
        """
        needed, rank = set(), dist.get_rank() if dist.is_initialized() else 0
        for path, module in self._modules.items():
            if path in self._parts or f"{path}._mch_sorted_raw_ids" not in tensors:
                continue
            self._parts[path] = []
            holding = [name for name, entry in entries.items() if path in entry.modules]
            if not holding:  # an earlier release's
                continue
            name = min(holding, key=lambda name: (entries[name].rank != rank, entries[name].rank))
            facts, own = entries[name].modules[path], self._rows[path]
            _check_facts(path, facts, facts_of(module, own), where)
            if facts.rows != own:
                _check_layout(path, module, own, (own,), (facts.rows,))
            self._parts[path].append(_Part(entries[name].rank, facts))
            needed.add(name)
        return needed

    def load(self, entry: CollisionsEntry, payload: bytes | memoryview) -> None:
        """Keep a saved rank's state of the modules until ``finish``.

        Raises:
            CorruptCheckpoint: the state differs from the index entry.
        """
        tensors = decode_state_chunk(entry, payload)
        for path, parts in self._parts.items():
            for part in parts:
                if part.rank == entry.rank:
                    part.tensors = _checked(path, tensors, part.facts)

    def finish(self) -> None:
        """Give the modules their saved state, once all blocks are restored."""
        for path, parts in self._parts.items():
            module = self._modules[path]
            if not isinstance(module, MCHManagedCollisionModule):
                continue
            if path in self._segments:  # was overwritten with the saved one
                module._output_segments_tensor.copy_(self._segments[path])
            if path in self._regrouped:
                module.validate_state()  # sorts the remapping table, whose parts were joined
            _resume(path, module, parts)


def check_held(collisions: Collisions, held: CollisionState, where: str) -> None:
    """Check that held modules are the live ones, on the same ranks.

    Raises:
        IncompatibleCheckpoint: names the module.
    """
    for path in collisions.modules.keys() | held.facts.keys():
        saved, module = held.facts.get(path), collisions.modules.get(path)
        if saved is None or module is None or saved.rows != collisions.rows[path]:
            raise IncompatibleCheckpoint(f"{path} is in {where} or in the model, of other rows")
        _check_facts(path, saved, facts_of(module, saved.rows), where)


def resume_held(collisions: Collisions, held: CollisionState) -> None:
    """Give modules that ``check_held`` has checked their state beside the model's tensors."""
    for path, module in collisions.modules.items():
        if isinstance(module, MCHManagedCollisionModule):
            facts = held.facts[path]
            _resume(path, module, [_Part(0, facts, _checked(path, held.tensors, facts))])


def _checked(path: str, tensors: object, facts: Facts) -> Tensors:
    """Return a module's part of a chunk, checked to be a history of at most its size."""
    history = tensors.get(path, {}) if isinstance(tensors, dict) else None
    room = max(0, facts.history_size)
    if not isinstance(history, dict) or not all(
        isinstance(kept, torch.Tensor) and kept.dim() == 1 and len(kept) <= room
        for kept in history.values()
    ):
        raise CorruptCheckpoint(f"{NAME}: the history of {path} is not one of at most {room} ids")
    return history


def _check_layout(
    path: str,
    module: ManagedCollisionModule | None,
    own: Span,
    now: tuple[Span, ...] | None,
    saved: tuple[Span, ...],
) -> None:
    """Refuse a shard that is no union of saved shards, with the raw ids dealt to them."""
    if module is None:
        raise IncompatibleCheckpoint(
            f"{path}: its remapping table was saved in rows {list(saved)} and is sharded as "
            f"{list(now or ())} now. Only a tracked model can take it then: pass "
            "tracked=track(model) to the LoadPlanner"
        )
    if now is None or not make_up(own, now, saved, module.input_size()):
        raise IncompatibleCheckpoint(
            f"{path}: raw ids belong to ranks by their value, and those of the {len(saved)} ranks "
            f"it was saved on, with rows {list(saved)}, are not those of the ranks with rows "
            f"{list(now or ())} now. TorchRec can't move an id to another rank: restore on "
            f"{len(saved)} ranks, or on one"
        )


def make_up(own: Span, now: tuple[Span, ...], saved: tuple[Span, ...], ids: int) -> bool:
    """Return whether a shard is a union of saved shards and gets exactly their raw ids.

    Args:
        own: the shard's rows.
        now: rows of all shards.
        saved: rows of all saved shards.
        ids: bound of the raw ids; 0 for unbounded ids, which are dealt out in turn.
    """
    rank = now.index(own)
    before, after = -(-ids // len(saved)), -(-ids // len(now))
    for number, (start, stop) in enumerate(saved):
        if stop <= own[0] or own[1] <= start:
            continue
        if start < own[0] or own[1] < stop:
            return False
        first, last = number * before, min((number + 1) * before, ids) - 1
        dealt_elsewhere = first <= last and {first // after, last // after} != {rank}
        if len(now) > 1 and (not ids or dealt_elsewhere):
            return False
    return True


def check_names(blocks: Iterable[Block], renamed: Mapping[str, str]) -> None:
    """Refuse to rename tables whose ids are remapped.

    Args:
        renamed: new names of renamed tables, by saved name.

    Raises:
        IncompatibleCheckpoint: a remapped table is renamed; names the table.
    """
    for path in dict.fromkeys(str(block.path[-1]).rpartition(".")[0] for block in blocks):
        prefix, _, table = path.rpartition(f"{COLLECTION}{MODULES}")
        for old, new in renamed.items():
            if new.startswith(f"{prefix}_embedding_module.") and new.endswith(f".{table}"):
                raise IncompatibleCheckpoint(
                    f"table {old!r} can't be restored into {new!r}: {path} maps its ids, which are "
                    "kept under the table's name; keep the name it was saved with"
                )


def _check_facts(path: str, saved: Facts, now: Facts, where: str) -> None:
    for what in ("input_hash_size", "buckets"):
        then, today = getattr(saved, what), getattr(now, what)
        if then != today:
            raise IncompatibleCheckpoint(
                f"{path} had {what} {then} in {where} and has {today} now, which maps ids to other "
                "rows: build the module as it was saved"
            )


def _resume(path: str, module: MCHManagedCollisionModule, parts: list[_Part]) -> None:
    """Set the module's history since its last eviction, joined from several modules if need be."""
    module._current_iter = -1  # makes TorchRec read the step count from the module's buffer
    module._current_history_buffer_offset = 0
    module._evicted = False
    parts = [part for part in parts if part.tensors]
    names = {name for name, _, in_history in module._eviction_policy.metadata_info if in_history}
    if any(part.facts.eviction_interval != module._eviction_interval for part in parts) or any(
        part.tensors.keys() != names | {"ids"} for part in parts
    ):
        logger.warning(
            "%s has another eviction policy than when it was saved: its history since the last "
            "eviction is dropped",
            path,
        )
        return
    if not parts:
        module._input_history_buffer_size = -1  # made anew, of the size of the next batch's ids
        return
    module._current_iter = max(part.facts.iteration for part in parts)
    module._last_eviction_iter = max(part.facts.last_eviction for part in parts)
    size = sum(part.facts.history_size for part in parts)
    count = sum(len(part.tensors["ids"]) for part in parts)
    module._input_history_buffer_size, module._current_history_buffer_offset = size, count
    module._history_accumulator = _joined("ids", parts, size, module.device)
    for name in names:
        kept = _joined(name, parts, size, module.device)
        module.register_buffer(f"_history_{name}", kept, persistent=False)
        module._history_metadata[name] = kept


def _joined(name: str, parts: list[_Part], size: int, device: torch.device) -> torch.Tensor:
    whole = torch.zeros(size, dtype=torch.int64, device=device)
    joined = torch.cat([part.tensors[name] for part in parts])
    whole[: len(joined)] = joined.to(device)
    return whole
