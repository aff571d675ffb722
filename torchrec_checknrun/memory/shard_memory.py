"""Move the memory of a rank's shards into an image, and notice when it is elsewhere again.

A tensor's storage is moved under it: parameters, views, state dicts and kernels all follow, since
they share the storage.
"""

from __future__ import annotations

import hashlib

import torch

from torchrec_checknrun.errors import ImagesRefused
from torchrec_checknrun.model.hand_written import WriteWatch, announced
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.model.tracked_shard import TrackedShard
from torchrec_checknrun.native import has_extension
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
        self._tracked = tracked
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

    @property
    def digest(self) -> str:
        """A digest of all that must be the same for an image to fit."""
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

    def watch_rows(self, watch: WriteWatch) -> list[int]:
        """Return the rows of each shard of a kernel, in the kernel's order."""
        return [shard.local.rectangle.rows for shard in self.shards if shard.writes is watch]

    def is_small(self, watch: WriteWatch, most: int) -> bool:
        """Tell whether a kernel's rows have at most so many bytes."""
        tensors = (t for s in self.shards if s.writes is watch for t in s.local.tensors)
        return sum(tensor.nbytes for tensor in tensors) <= most

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
        """Whether the model's shards still lie where they were moved to."""
        now = [shard for shard in self._tracked.shards if not shard.local.replicated]
        return now == self.shards and self._moved == self._places()

    def _places(self) -> list[int]:
        return [place for watch in self.watches for place in watch.kernel.memory().places]


def _require_supported(tracked: TrackedModel, shards: list[TrackedShard]) -> None:
    if tracked.collisions.modules:
        raise ImagesRefused(
            "survive=Images() can't keep managed-collision modules yet, and the model has "
            f"{sorted(tracked.collisions.modules)}: run without it"
        )
    for shard in tracked.shards:
        for tensor in shard.local.tensors:
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ImagesRefused(
                    f"table {shard.table} lies on {tensor.device}: survive=Images() keeps tables "
                    "in CPU memory only, since a GPU's memory goes with the process; run without it"
                )
    if not has_extension():
        raise ImagesRefused("survive=Images() needs the compiled extension, which is missing")
