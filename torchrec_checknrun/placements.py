"""Find the parts of a DTensor that this rank holds: shards of FSDP2 and of tensor parallelism.

For each dimension of its mesh of ranks a DTensor has a placement: split along one of the tensor's
dimensions, or replicated. Shards may be uneven or empty. With FSDP over tensor parallelism a shard
may consist of several parts that are not adjacent in the whole (``_StridedShard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchrec_checknrun.boxes import Box, Span
from torchrec_checknrun.errors import UnsupportedState


@dataclass(frozen=True)
class LocalPart:
    """A part of a sharded tensor in this rank's memory.

    Attributes:
        box: place of the part in the whole.
        tensor: the part's memory, of the box's shape.
        replica: whether another rank of the mesh has the same part and writes it.
        elsewhere: whether ranks outside the mesh may hold the same part.
    """

    box: Box
    tensor: torch.Tensor
    replica: bool = False
    elsewhere: bool = False


def local_parts(value: DTensor, name: str) -> list[LocalPart]:
    """Find the parts of a DTensor that this rank holds; a rank outside its mesh holds none.

    Args:
        value: a DTensor of plain local tensors.
        name: the tensor's name in errors.

    Raises:
        UnsupportedState: the tensor is a partial sum, or its local tensor has another shape or type
            than its placements imply.
    """
    mesh, placements = value.device_mesh, value.placements
    _check(placements, name)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():
        local = value.to_local()
    runs = held_runs(tuple(value.size()), mesh.shape, coordinate, placements)
    shape = tuple(sum(stop - start for start, stop in along) for along in runs)
    if type(local) is not torch.Tensor or tuple(local.shape) != shape:
        raise UnsupportedState(
            f"{name}: its local tensor is a {type(local).__name__} of {list(local.shape)}, where "
            f"placements {placements} of {list(value.size())} give a Tensor of {list(shape)}: make "
            "it with distribute_tensor or fully_shard, or let state_dict() return a plain tensor"
        )
    replica = _lowest_holder(mesh, placements, coordinate) != dist.get_rank()
    elsewhere = mesh.size() < dist.get_world_size()
    if not value.numel():  # no rank holds a value; one rank records that the tensor exists
        replica = int(mesh.mesh.min()) != dist.get_rank()
        empty = torch.empty(value.size(), dtype=value.dtype, device=local.device)
        return [LocalPart(Box.whole(value.size()), empty, replica, elsewhere)]
    parts = []
    for pairs in product(*(zip(along, _positions(along), strict=True) for along in runs)):
        box = Box(tuple(span for span, _ in pairs))
        if box.volume:
            place = tuple(slice(*span) for _, span in pairs)
            parts.append(LocalPart(box, local.detach()[place], replica, elsewhere))
    return parts


def held_runs(
    size: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[list[Span]]:
    """Find the runs of positions along each dimension that a rank's local tensor has.

    Args:
        size: shape of the whole tensor.
        mesh_shape: ranks along each dimension of the mesh.
        coordinate: the rank's place in the mesh.
        placements: one per dimension of the mesh.
    """
    runs: list[list[Span]] = [[(0, length)] for length in size]
    for ranks, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        along = runs[placement.dim]
        length = sum(stop - start for start, stop in along)
        # A strided shard takes one chunk of each part that a later dimension of the mesh makes.
        parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        chosen = []
        for part in range(parts):
            first, last = _chunk(0, length, parts, part)
            chosen.append(_chunk(first, last, ranks, rank))
        runs[placement.dim] = _select(along, chosen)
    return runs


def _chunk(start: int, stop: int, count: int, number: int) -> Span:
    """Return one of the chunks that ``torch.chunk`` makes of a range; the last may be empty."""
    size = -(-(stop - start) // count)
    return min(start + size * number, stop), min(start + size * (number + 1), stop)


def _select(runs: Sequence[Span], chosen: Sequence[Span]) -> list[Span]:
    """Return the runs of the values whose place, counted over all runs, is in a chosen range."""
    found: list[Span] = []
    for first, last in chosen:
        for (start, _), (at, end) in zip(runs, _positions(runs), strict=True):
            low, high = max(first, at), min(last, end)
            if low < high:
                span = start + low - at, start + high - at
                if found and found[-1][1] == span[0]:
                    span = found.pop()[0], span[1]
                found.append(span)
    return found


def _positions(runs: Sequence[Span]) -> list[Span]:
    """Return each run's place in the local tensor."""
    return list(pairwise(accumulate((stop - start for start, stop in runs), initial=0)))


def _check(placements: Sequence[Placement], name: str) -> None:
    """Refuse placements other than shards and replicas."""
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedState(
            f"{name} is a DTensor with placements {tuple(placements)}: a partial sum, of which no "
            "rank has the total. Redistribute it first (redistribute(placements=[Replicate()]) or "
            "Shard)"
        )
    if not all(isinstance(p, (Replicate, Shard, _StridedShard)) for p in placements):
        raise UnsupportedState(
            f"{name} is a DTensor with placements {tuple(placements)}: only Shard and Replicate "
            "can be stored; redistribute it first"
        )


def _lowest_holder(
    mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> int:
    """Find the lowest rank of a mesh that holds the same part as the rank at a coordinate."""
    same: Any = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return int(mesh.mesh[same].min())


def dtype_of(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a tensor's values; None where ranks may disagree on it."""
    if isinstance(tensor, ShardedTensor):
        return tensor.metadata().tensor_properties.dtype  # .dtype is float32 for any content
    if isinstance(tensor, DTensor) and type(tensor._local_tensor) is not torch.Tensor:
        return None
    return tensor.dtype


def laid_out_as(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Lay out values in the order in memory that ``empty_like`` of another tensor has.

    Returns:
        The tensor itself if its order is that one, or if the two differ in shape or are not plain.
    """
    plain = type(values) is torch.Tensor and type(other) in (torch.Tensor, torch.nn.Parameter)
    if not plain or values.shape != other.shape or values.dim() < 2:
        return values
    if values.layout != torch.strided or other.layout != torch.strided:
        return values
    if values.stride() == torch.empty_like(other, device="meta").stride():
        return values
    laid = torch.empty_like(other, dtype=values.dtype, device=values.device, requires_grad=False)
    return laid.copy_(values.detach())


def zeros_placed_as(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make zeros of a tensor's shape, dtype and order in memory; for a DTensor, one with the same
    placements.

    Args:
        device: the zeros' device; on the meta device they have no data.
    """
    if not isinstance(tensor, DTensor):
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        return laid_out_as(zeros, tensor)
    with torch.no_grad():
        local = torch.zeros_like(tensor.to_local(), device=device)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.size(),
        stride=tensor.stride(),
    )
