"""Encode rows upon the references of their shard, which keep them in turn, in one pass.

The compiled operation takes each row from what is kept of it to what is kept next while it is in
the nearest cache; NumPy does one thing after the other. Both give the same bytes and references.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from torchrec_checknrun.delta import rows
from torchrec_checknrun.delta.payload import join
from torchrec_checknrun.delta.references import Record, References
from torchrec_checknrun.delta.rows import Grid, Kind
from torchrec_checknrun.native import has_extension

RESET = 2
"""A row whose step should be so many powers of two larger than its predecessor's was reset."""

Restored = Callable[[np.ndarray], Grid]
"""Returns what some of the encoded rows restore to, by their positions among these."""


def encode_upon(
    references: References,
    weight: torch.Tensor,
    positions: np.ndarray,
    wanted: np.ndarray,
    note: Callable[[Record], object],
) -> tuple[torch.Tensor, Restored]:
    """Encode rows upon their predecessors, which they replace; see ``rows.encode``.

    Args:
        weight: ``(n, cols)`` of fp32, bf16 or fp16, on any device.
        positions: ``(n,)`` int64, in the shard, sorted and distinct.
        wanted: ``(n,)`` int16 exponents.
        note: receives the rows as they were, before the new ones can be lost by an error.

    Returns:
        The payload, 1-D uint8; and the new rows, as long as the references hold them.

    Raises:
        ValueError: predecessors are not sound; the references are as they were.
    """
    weight = weight.detach().cpu()
    if weight.stride(1) != 1 or not len(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    wanted = np.ascontiguousarray(wanted, np.int16)
    if has_extension():
        payload = join(*references.link(positions, weight, wanted, RESET, note))
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
    references: References,
    weight: torch.Tensor,
    positions: np.ndarray,
    wanted: np.ndarray,
    note: Callable[[Record], object],
) -> torch.Tensor:
    before = references.gather(positions)
    known = Grid(before.kind.copy(), before.exponent, before.codes)
    reset = (before.kind == Kind.GRID) & (wanted >= before.exponent + RESET)
    known.kind[reset] = Kind.NONE
    payload, after = rows.encode(weight, wanted, known)
    note(references.record(positions))
    references.scatter(positions, after, before)
    return payload
