"""Gather and compare the whole state of a small sharded model, as bytes.

``gather`` puts tables, fused optimizer state, dense part and dense optimizer together from
TorchRec's own state dicts, so that it says nothing about how this package sees the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.distributed.models import Job, ModelSpec

State = dict[str, np.ndarray]
"""A model's whole state: global tensors by name."""


@dataclass
class Part:
    """A local piece of a global tensor."""

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


class Trained(Protocol):
    """A ``Job``, or any other object with a model and an optimizer."""

    model: Any
    optimizer: Any


def local_parts(job: Trained) -> list[Part]:
    """Return this rank's pieces of the state, as views (or plain numbers) of the live state."""
    parts: list[Part] = []
    _collect(job.model.state_dict(), "model", parts)
    _collect(job.optimizer.state_dict(), "optimizer", parts)
    return parts


def _collect(value: Any, path: str, parts: list[Part]) -> None:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            offset = tuple(shard.metadata.shard_offsets)
            parts.append(Part(path, tuple(value.size()), offset, shard.tensor.detach()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{path}/{key}", parts)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _collect(item, f"{path}[{i}]", parts)
    elif isinstance(value, torch.Tensor):
        parts.append(Part(path, tuple(value.shape), (0,) * value.dim(), value.detach()))
    elif isinstance(value, (int, float)):
        parts.append(Part(path, (), (), torch.tensor(value, dtype=torch.float64)))


def gather(job: Trained) -> State:
    """Gather the whole state on every rank; call it on all ranks."""
    mine = [(p.name, p.size, p.offset, p.tensor.cpu().numpy().copy()) for p in local_parts(job)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    state: State = {}
    for name, size, offset, array in (part for parts in everyone for part in parts):
        whole = state.setdefault(name, np.zeros(size, array.dtype))
        whole[tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))] = array
    return state


def row_bytes(
    spec: ModelSpec, state: State
) -> dict[tuple[str, int], tuple[bytes, dict[str, bytes]]]:
    """Return weight and optimizer state of every row, by table and row."""
    found: dict[tuple[str, int], tuple[bytes, dict[str, bytes]]] = {}
    for path, table in spec.table_paths.items():
        prefix = f"optimizer/state/{path}.weight/{table.name}."
        optimizer = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        for row, weight in enumerate(state[f"model/{path}.weight"]):
            states = {name: values[row].tobytes() for name, values in optimizer.items()}
            found[path, row] = (weight.tobytes(), states)
    return found


def local_bytes(job: Trained) -> dict[str, bytes]:
    """Copy this rank's state as bytes, to show later that nothing changed."""
    return {f"{p.name}@{p.offset}": p.tensor.cpu().numpy().tobytes() for p in local_parts(job)}


@torch.no_grad()
def scramble(job: Job, seed: int = 99) -> None:
    """Overwrite the whole state with noise, so that what a restore leaves out shows."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for part in local_parts(job):
        if part.tensor.is_floating_point():
            part.tensor.copy_(torch.rand(part.tensor.shape, generator=generator))
    job.steps = -1
