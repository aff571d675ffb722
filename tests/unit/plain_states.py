"""Send plain states through ``dcp.save`` and ``dcp.load`` in one process; return errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_checknrun.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.store.folder import Folder

State = dict[str, Any]


class Counter:
    """A stateful object as DCP expects it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> State:
        return {"value": self.value}

    def load_state_dict(self, state_dict: State) -> None:
        self.value = state_dict["value"]


def example(fill: float = 1.0) -> State:
    return {
        "weight": torch.full((3, 4), fill),
        "optimizer": {0: {"step": torch.tensor(fill)}, "lr": fill, "names": ["a", "b"]},
        "rng": np.full(3, int(fill)),
        "counter": Counter(int(fill)),
        "nothing": {},
    }


def save(root: Folder, name: str, state: State) -> Manifest:
    metadata = dcp.save(
        state,
        storage_writer=StorageWriter((root / name).url),
        planner=SavePlanner(),
        no_dist=True,
    )
    manifest = metadata.planner_data
    assert isinstance(manifest, Manifest)
    return manifest


def load(root: Folder, name: str, state: State) -> None:
    dcp.load(
        state,
        storage_reader=StorageReader((root / name).url),
        planner=LoadPlanner(),
        no_dist=True,
    )


def cause(act: Callable[[], object]) -> Exception:
    """Return the error that made DCP fail."""
    with pytest.raises(CheckpointException) as raised:
        act()
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, Exception)
    assert type(error).__name__ in str(raised.value)
    assert str(error) in str(raised.value)
    return error
