"""Check that restored remapping tables are right where they are, and make modules go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from torchrec_checknrun.boxes import Span
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import Entry, decode_state_chunk
from torchrec_checknrun.format.collision_chunk import NAME, Facts, Tensors, collision_facts
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.model.collisions import (
    COLLECTION,
    MODULES,
    RAW_IDS,
    Collisions,
    facts_of,
    logger,
)


@dataclass
class _Part:
    """What one rank knew of a module."""

    rank: int
    facts: Facts
    tensors: Tensors = field(default_factory=dict)


class CollisionRestore:
    """Checks that restored remapping tables are right where they are, and makes modules go on.

    Args:
        collisions: the model's modules; None if only its state dict is known.
    """

    def __init__(self, collisions: Collisions | None) -> None:
        self._modules = collisions.modules if collisions is not None else {}
        self._parts: dict[str, list[_Part]] = {}
        self._regrouped: set[str] = set()
        self._segments: dict[str, torch.Tensor] = {}

    def plan(
        self,
        entries: Mapping[str, Entry],
        blocks: Iterable[tuple[Block, tuple[Span, ...]]],
        where: str,
    ) -> list[str]:
        """Checks every module of which raw ids are among the blocks.

        Args:
            entries: index entries of what the modules knew, by the name of the chunk.
            blocks: what will be restored, with the rows of the saved shards.
            where: what errors call the checkpoint.

        Returns:
            The names of the chunks that are needed.

        Raises:
            IncompatibleCheckpoint: names the module, and what can be done.
        """
        known = {name: collision_facts(entry) for name, entry in entries.items()}
        needed = set()
        for block, saved in blocks:
            path, _, buffer = str(block.path[-1]).rpartition(".")
            if buffer not in RAW_IDS:
                continue
            own = block.rows
            module = self._modules.get(path)
            if buffer == "_mch_sorted_raw_ids" and block.layout != saved:
                _check_layout(path, module, own, block.layout, saved)
                self._regrouped.add(path)
            if module is None:
                continue
            self._parts[path] = []
            for name, (rank, modules) in known.items():
                if path not in modules:
                    continue
                facts = modules[path]
                _check_facts(path, facts, facts_of(module, own), where)
                if own[0] <= facts.rows[0] and facts.rows[1] <= own[1]:
                    self._parts[path].append(_Part(rank, facts))
                    needed.add(name)
            if isinstance(module, MCHManagedCollisionModule):
                self._segments[path] = module._output_segments_tensor.clone()
        return sorted(needed)

    def load(self, entry: Entry, payload: bytes | memoryview) -> None:
        """Keeps what a rank's modules knew until ``finish``.

        Raises:
            CorruptCheckpoint: it isn't what the index entry says.
        """
        tensors = decode_state_chunk(entry, payload)
        for path, parts in self._parts.items():
            for part in parts:
                if part.rank == entry["rank"]:
                    part.tensors = _checked(path, tensors, part.facts)

    def finish(self) -> None:
        """Makes the modules go on as they were saved, when all blocks have come."""
        for path, segments in self._segments.items():
            module = self._modules[path]
            module._output_segments_tensor.copy_(segments)  # the saved ones came with the model
            if path in self._regrouped:
                module.validate_state()  # sorts the remapping table, of which parts were joined
            _resume(path, module, self._parts[path])


def _checked(path: str, tensors: object, facts: Facts) -> Tensors:
    """A module's part of what is stored."""
    history = tensors.get(path, {}) if isinstance(tensors, dict) else None
    room = max(0, facts.history_size)
    if not isinstance(history, dict) or not all(
        isinstance(kept, torch.Tensor) and kept.dim() == 1 and len(kept) <= room
        for kept in history.values()
    ):
        raise CorruptCheckpoint(f"{NAME}: what {path} has seen is no history of {room} ids")
    return history


def _check_layout(
    path: str,
    module: ManagedCollisionModule | None,
    own: Span,
    now: tuple[Span, ...] | None,
    saved: tuple[Span, ...],
) -> None:
    """Refuses shards that the saved ones, with the raw ids dealt to them, don't make up."""
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
    """Whether a shard is some of the saved ones, and gets exactly the raw ids that they got.

    Args:
        ids: raw ids are below this; 0 for any, which are dealt out in turn.
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
    """Refuses to rename tables whose ids are mapped.

    Args:
        renamed: by saved name, the tables that go into one of another name.

    Raises:
        IncompatibleCheckpoint: names the table.
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
                f"{path} had {what} {then} in {where} and has {today} now, which maps ids "
                "elsewhere: build the module as it was saved"
            )


def _resume(path: str, module: MCHManagedCollisionModule, parts: list[_Part]) -> None:
    """Sets what the module has seen since its last eviction, joined if it was several modules."""
    module._current_iter = -1  # TorchRec's sign that the steps are to be counted from the buffer's
    module._current_history_buffer_offset = 0
    module._evicted = False
    parts = [part for part in parts if part.tensors]
    names = {name for name, _, in_history in module._eviction_policy.metadata_info if in_history}
    if any(part.facts.eviction_interval != module._eviction_interval for part in parts) or any(
        part.tensors.keys() != names | {"ids"} for part in parts
    ):
        logger.warning(
            "%s evicts in another way than when it was saved: what it had seen since its last "
            "eviction is dropped",
            path,
        )
        return
    if not parts:
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
