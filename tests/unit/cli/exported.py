"""Load exported checkpoints, and find the newest checkpoint to export."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.unit.chains import DIM, same_bits
from torchrec_checknrun.store.folder import Folder

WHOLE = (0, DIM)


def assert_loads(folder: str | Path, wanted: dict[str, torch.Tensor]) -> None:
    loaded = {name: torch.full_like(tensor, -7) for name, tensor in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    for name, tensor in wanted.items():
        assert same_bits(loaded[name], tensor), name


def newest_id(root: Folder) -> str:
    return max(name for name in root.names() if name.startswith("seq"))
