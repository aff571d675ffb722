"""Move the memory of a rank's shards into an image, and notice when it is elsewhere again.

A tensor's storage is moved under it: parameters, views, state dicts and kernels all follow, since
they share the storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.memory.step_journal import KernelJournal, StepJournal
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.module_tree import embedding_collections
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.native import build_command, extension_problem, has_extension
from torchrec_checknrun.shared_memory.areas import Areas


class ShardMemory:
    """The storages of all shards that only one rank has.

    Args:
        tracked: the model's tables.

    Attributes:
        shards: of fused kernels; data-parallel tables are state that all ranks have.
        watches: one for each of their kernels.
        bytes, largest: of all storages, and of the largest one.

    Raises:
        ImagesRefused: a shard can't lie in an image; names it.
    """

    def __init__(self, tracked: TrackedModel) -> None:
        self._tracked, self._known = tracked, tracked.shards
        self.shards = [shard for shard in tracked.shards if not shard.local.replicated]
        _require_supported(tracked, self.shards)
        self.watches: list[WriteWatch] = list(dict.fromkeys(shard.writes for shard in self.shards))
        self._storages: dict[int, torch.Tensor] = {}
        for shard in self.shards:
            for tensor in shard.local.tensors:
                self._storages.setdefault(tensor.untyped_storage()._cdata, tensor)
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._storages.values()]
        self.bytes, self.largest = sum(sizes), max(sizes, default=0)
        self._moved: list[int] = []
        self._loads: list[RemovableHandle] = []

    @property
    def digest(self) -> str:
        """Return a digest of all that must be the same for an image to fit."""
        shards = [
            (
                shard.table,
                str(shard.rectangle),
                [(tuple(t.shape), str(t.dtype), t.storage_offset()) for t in shard.local.tensors],
                sorted(shard.local.optimizer),
                str(getattr(shard.writes.kernel.module._emb_module, "optimizer", None)),
            )
            for shard in self.shards
        ]
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._storages.values()]
        return hashlib.sha256(repr((1, shards, sizes)).encode()).hexdigest()

    def watch(self, journal: StepJournal, most: int) -> None:
        """Have each kernel's rows journaled before they change.

        Args:
            most: bytes of a kernel up to which it may be journaled whole.
        """
        first = 0
        for watch in self.watches:
            shards = [shard.local for shard in self.shards if shard.writes is watch]
            rows = [shard.rectangle.rows for shard in shards]
            small = sum(tensor.nbytes for shard in shards for tensor in shard.tensors) <= most
            moves = bool(watch.kernel.touches_other_rows or self._tracked.collisions.modules)
            watch.journal = KernelJournal(journal, first, rows, small, moves)
            first += len(rows)

    def watch_loads(self, model: nn.Module, missed: Callable[[], None]) -> None:
        """Have a call made before ``load_state_dict`` writes to rows of the model."""

        def before_load(*_: object) -> None:  # no method: a copy of the model shares it
            missed()

        for _, collection in embedding_collections(model):
            self._loads.append(collection.register_load_state_dict_pre_hook(before_load))

    def unwatch(self) -> None:
        """Journal no more rows, and make no more calls."""
        for watch in self.watches:
            watch.journal = None
        while self._loads:
            self._loads.pop().remove()

    def move(self, areas: Areas, keep: bool) -> None:
        """Move the storages into an image.

        Args:
            keep: whether they take the image's content, or the image theirs.

        Raises:
            ImagesRefused: too little memory is left; what was moved has its content.
        """
        with announced([watch.kernel.module for watch in self.watches]):
            for number, tensor in enumerate(self._storages.values()):
                name, size = f"storage-{number}", tensor.untyped_storage().nbytes()
                if size == 0:
                    continue
                place = areas.get(name) if keep or areas.has(name) else areas.add(name, size)
                if tensor.untyped_storage().data_ptr() != place.data_ptr():
                    torch.ops.checknrun.move_storage(tensor, place, keep)
        self._moved = self._places()

    @property
    def is_in_place(self) -> bool:
        """Return whether the model's shards still lie where they were moved to."""
        if self._tracked.shards is not self._known:  # looked for again
            now = [shard for shard in self._tracked.shards if not shard.local.replicated]
            if now != self.shards:
                return False
            self._known = self._tracked.shards
        return self._moved == self._places()

    def _places(self) -> list[int]:
        return [place for watch in self.watches for place in watch.kernel.memory().places]


def _require_supported(tracked: TrackedModel, shards: list[TrackedShard]) -> None:
    for shard in tracked.shards:
        for tensor in shard.local.tensors:
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ImagesRefused(
                    f"table {shard.table} lies on {tensor.device}: survive=Images() keeps tables "
                    "in CPU memory only, since a GPU's memory goes with the process; "
                    "survive=HostCopies() keeps the newest checkpoint in this machine's memory"
                )
    if not has_extension():
        raise ImagesRefused(
            f"survive=Images() needs the compiled kernel, which {extension_problem()}. Build the "
            f"kernel with g++: {build_command()}"
        )
