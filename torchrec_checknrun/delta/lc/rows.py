"""Encode rows as LC-Checkpoint does, upon the values that their predecessors restore to.

A link is what ``buckets`` packs of all its values. Rows of a base stand alone: their bytes in the
type of the table, or fp32 where that type would not give every bit back, as in a compacted copy of
links to a table of bf16.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.delta.grid import Grid, Kind
from torchrec_checknrun.delta.lc import buckets
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.delta.references import Note, References, Restored


def encode_upon(
    references: References,
    positions: np.ndarray,
    note: Note,
    *,
    weight: torch.Tensor,
    bits: int,
) -> tuple[torch.Tensor, Restored]:
    """Encode rows upon their predecessors; see ``references.EncodeUpon`` and ``buckets.encode``.

    Args:
        weight: ``(n, cols)`` of fp32, bf16 or fp16, on any device.
        bits: the paper's x.
    """
    payload, after = buckets.encode(weight, _values(references.gather(positions)), bits)
    return keep(references, positions, note, values=after, payload=payload)


def keep(
    references: References,
    positions: np.ndarray,
    note: Note,
    *,
    values: torch.Tensor,
    payload: torch.Tensor,
) -> tuple[torch.Tensor, Restored]:
    """Keep the values that an encoded payload restores to; see ``references.EncodeUpon``."""
    assert isinstance(references, ValueReferences)
    note(references.undo(positions))
    references.scatter(positions, rows_of(values))
    return payload, lambda chosen: references.gather(positions[chosen])


def apply(payload: torch.Tensor, rows: int, bits: int, before: Grid, chosen: np.ndarray) -> Grid:
    """Decode chosen rows of a link upon their predecessors.

    Args:
        payload: as from ``encode_upon``, 1-D uint8 on the CPU.
        rows: of the whole payload.
        bits: the width that the link was encoded with.
        before: the predecessors of the chosen rows; it is not changed.
        chosen: positions of rows, ``(n,)`` int64.

    Raises:
        ValueError: no encoder writes such a payload, or not upon these predecessors.
    """
    if not len(payload) or int(payload[0]) != bits:
        raise ValueError(f"a link of other than {bits} bits")
    if len(chosen) == rows:
        return rows_of(buckets.decode(payload, _values(before)))
    whole = torch.zeros((rows, before.codes.shape[1]), dtype=torch.float32, device="cpu")
    at = torch.from_numpy(chosen)
    whole[at] = _values(before)
    return rows_of(buckets.decode(payload, whole)[at])


def alone(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """Encode rows that stand alone.

    Args:
        values: ``(n, cols)`` fp32 on the CPU.
        dtype: of the table.

    Returns:
        The payload, 1-D uint8, and the type that its values have.
    """
    values = values.contiguous()
    narrow = values.to(dtype)
    # Conversions between fp16 and fp32 may change the bits of NaN.
    same = torch.equal(_bits(narrow.float()), _bits(values)) and not bool(narrow.isnan().any())
    kept = narrow if same else values
    return kept.view(-1).view(torch.uint8), kept.dtype


def chosen_rows(
    payload: torch.Tensor, dtype: torch.dtype, rows: int, dim: int, chosen: np.ndarray
) -> Grid:
    """Decode chosen rows of a payload of ``alone``.

    Raises:
        ValueError: the payload is of another size.
    """
    size = rows * dim * dtype.itemsize
    if len(payload) != size:
        raise ValueError(f"{rows} rows of {dim} values of {dtype} take {size} bytes")
    # Copied, and so aligned.
    stored = payload.numpy().view(f"V{dim * dtype.itemsize}")[chosen]
    data = torch.from_numpy(stored.view(np.uint8)).view(dtype)
    return rows_of(data.view(len(chosen), dim).float())


def rows_of(values: torch.Tensor) -> Grid:
    """Return fp32 values, ``(n, cols)``, as rows that are stored bit for bit."""
    n = len(values)
    return Grid(np.full(n, Kind.VERBATIM, np.uint8), np.zeros(n, np.int16), _bits(values).numpy())


def _values(rows: Grid) -> torch.Tensor:
    """Return rows as fp32 values; NaN where none are known, upon which nothing is added."""
    if (rows.kind == Kind.GRID).any():
        raise ValueError("predecessors on grids, where values are due")
    values = torch.from_numpy(rows.codes).view(torch.float32).clone()
    values[torch.from_numpy(rows.kind == Kind.NONE)] = torch.nan
    return values


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)
