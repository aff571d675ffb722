"""Encode rows upon the references of their shard, which keep them in turn, in one pass.

The compiled operation takes each row from what is kept of it to what is kept next while it is in
the nearest cache; NumPy does one thing after the other. Both give the same bytes and references.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from torchrec_checknrun.delta import rows
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.payload import join
from torchrec_checknrun.delta.references import Note, References, Restored
from torchrec_checknrun.delta.rows import Grid, Kind
from torchrec_checknrun.native import has_extension

RESET = 2
"""A row whose step should be so many powers of two larger than its predecessor's was reset."""


def encode_upon(
    references: References,
    positions: np.ndarray,
    note: Note,
    *,
    weight: torch.Tensor,
    wanted: np.ndarray,
) -> tuple[torch.Tensor, Restored]:
    """Encode rows upon their predecessors; see ``references.EncodeUpon`` and ``rows.encode``.

    Args:
        weight: ``(n, cols)`` of fp32, bf16 or fp16, on any device.
        wanted: ``(n,)`` int16 exponents.

    Raises:
        ValueError: predecessors are not sound; the references are as they were.
    """
    assert isinstance(references, GridReferences)
    weight = weight.detach().cpu()
    if weight.stride(1) != 1 or not len(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    wanted = np.ascontiguousarray(wanted, np.int16)
    if has_extension():
        payload = join(
            *references.link(
                positions,
                weight,
                wanted,
                RESET,
                lambda record: note(partial(references.put_back, record)),
            )
        )
    else:
        payload = _in_steps(references, weight, positions, wanted, note)

    def restored(chosen: np.ndarray) -> Grid:
        found = references.gather(positions[chosen])
        exact = np.flatnonzero(found.kind == Kind.VERBATIM)
        bits = weight[torch.from_numpy(chosen[exact])].float().contiguous()
        found.codes[exact] = bits.view(torch.int32).numpy()
        return found

    return payload, restored


def _in_steps(
    references: GridReferences,
    weight: torch.Tensor,
    positions: np.ndarray,
    wanted: np.ndarray,
    note: Note,
) -> torch.Tensor:
    before = references.gather(positions)
    known = Grid(before.kind.copy(), before.exponent, before.codes)
    reset = (before.kind == Kind.GRID) & (wanted >= before.exponent + RESET)
    known.kind[reset] = Kind.NONE
    payload, after = rows.encode(weight, wanted, known)
    note(references.undo(positions))
    references.scatter(positions, after, before)
    return payload
