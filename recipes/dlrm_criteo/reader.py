"""Feed a rank its batches, and count the trained samples.

The position is one number for the whole job, so it is valid on any number of ranks. The position
counts samples that went through the optimizer, not those read: a pipeline holds batches in flight,
which must be read again after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recipes.dlrm_criteo.samples import Dataset, Samples, local_batch


class Reader:
    """An iterator over this rank's batches from `position` on; Stateful, for checkpoints.

    Iterating does not move the position, `trained()` does. A running iterator does not notice
    `load_state_dict`: ask for a new one.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        rank: int,
        world_size: int,
        device: torch.device | str,
        features: Sequence[str] = DEFAULT_CAT_NAMES,
    ) -> None:
        # Raises if the ranks can't share a batch equally
        local_batch(global_batch, rank, world_size)
        self.dataset = dataset
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.features = features
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        samples = self.dataset.read(self.position, self.global_batch, self.rank, self.world_size)
        return (to_batch(s, self.device, self.features) for s in samples)

    def trained(self) -> None:
        """Count one global batch that went through the optimizer."""
        self.position += self.global_batch

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = state.get("samples")
        if position is None or int(position) < 0:
            raise ValueError(
                f"the reader's state is {state!r}; expected {{'samples': n}} with n >= 0, "
                "as Reader.state_dict() returns it"
            )
        self.position = int(position)


def to_batch(
    samples: Samples, device: torch.device, names: Sequence[str] = DEFAULT_CAT_NAMES
) -> Batch:
    """Convert samples for TorchRec's models: one id per sample and feature, feature by feature."""
    stride = len(samples.labels)
    features = KeyedJaggedTensor(
        keys=list(names),
        values=torch.from_numpy(samples.sparse.T.reshape(-1)),
        lengths=torch.ones(len(names) * stride, dtype=torch.int32),
        stride=stride,
    )
    batch = Batch(torch.from_numpy(samples.dense), features, torch.from_numpy(samples.labels))
    return batch.to(device, non_blocking=True)
