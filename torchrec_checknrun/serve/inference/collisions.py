"""Serve tables whose ids are mapped to rows by managed collisions: a version has rows and maps.

Training deals ids over ranks by value, and each rank keeps a sorted map of its own. A served module
has one map of all ids, sorted as TorchRec sorts what it loads. An id without a row goes to the last
row of the table there, and to the last row of its rank's part in training.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedTable

_SORTED = "_mch_sorted_raw_ids"
_HASHED = "_hash_zch_identities"
_PER_ID = "_mch_"
"""Beginning of the names of buffers that have a value for each id of a sorted map."""
_SHARDED = ("ShardedQuantManagedCollision", "ShardedManagedCollision")
"""Beginnings of the names of TorchRec's modules whose shards have maps of their own."""


def check_collisions(model: nn.Module) -> None:
    """Refuse modules that map ids in another way than a model that predicts does.

    Raises:
        UnsupportedTable: a module is in training mode, or holds a part of a map; names it.
    """
    for path, module in model.named_modules():
        if type(module).__name__.startswith(_SHARDED):
            raise UnsupportedTable(
                f"{path or 'the model'} maps ids to rows (managed collisions), and is sharded: "
                "each shard maps ids of a range that depends on the number of shards, which is not "
                "the trainer's. Serve a model that is not sharded"
            )
        if not (hasattr(module, _SORTED) or hasattr(module, _HASHED)):
            continue
        if module.training:
            raise UnsupportedTable(
                f"{path or 'the model'} maps ids to rows (managed collisions), and is in training "
                "mode, in which predictions would change the map: call model.eval()"
            )
        if getattr(module, "_output_global_offset", 0) or getattr(module, "is_sharded", False):
            raise UnsupportedTable(
                f"{path or 'the model'} maps ids to rows (managed collisions), and holds a part of "
                "its map: serve a model that is not sharded"
            )


def joined(dense: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sort the maps in a checkpoint's dense part, in which each rank's part is sorted.

    Raises:
        CorruptCheckpoint: a map's parts have different sizes.
    """
    found = dict(dense)
    for name in dense:
        prefix, _, last = name.rpartition(".")
        if last != _SORTED:
            continue
        ids = dense[name]
        order = torch.argsort(ids, stable=True)
        for other, value in dense.items():
            if other.rpartition(".")[0] == prefix and other.rpartition(".")[2].startswith(_PER_ID):
                if value.shape != ids.shape:
                    raise CorruptCheckpoint(
                        f"{other} has {list(value.shape)} values for {list(ids.shape)} ids"
                    )
                found[other] = value[order]
    return found
