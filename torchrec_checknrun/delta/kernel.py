"""Put rows on their grids and add differences up, by the compiled kernel or NumPy.

Both give the same integers and bytes, see ``layout``. The compiled kernel takes no row through more
than one pass, and releases Python's lock.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_checknrun.delta import layout, numpy_rows
from torchrec_checknrun.delta.grid import Grid
from torchrec_checknrun.native import has_extension

BUILD = ""
"""The compiled kernel's build; empty: the best one that runs here."""


def encode_rows(
    weight: torch.Tensor | None, wanted: np.ndarray | None, before: Grid | None, after: Grid
) -> tuple[np.ndarray, list[int]]:
    """Encode rows into streams.

    Args:
        weight: ``(n, dim)`` fp32, bf16 or fp16 on the CPU, each row in one piece; None: ``after``
            holds the rows already.
        wanted: ``(n,)`` int16 exponents, with weights.
        before: the predecessors; None: all rows stand alone.
        after: set to what the streams restore.

    Returns:
        The streams, one behind the other, and their sizes.

    Raises:
        ValueError: ``after`` was given and is not sound.
    """
    if not has_extension():
        return numpy_rows.encode_rows(weight, wanted, before, after)
    exponents = None if wanted is None else torch.from_numpy(wanted)
    data, sizes = torch.ops.checknrun.delta_encode(
        weight, exponents, *_tensors(before), *_tensors(after), BUILD
    )
    return data.numpy(), sizes


def apply_streams(
    data: np.ndarray,
    rows: int,
    dim: int,
    chosen: np.ndarray | None,
    first: int,
    before: Grid | None,
    after: Grid,
) -> None:
    """Decode rows of streams upon their predecessors.

    Args:
        data: the streams, one behind the other, and ``layout.SLACK`` more bytes.
        rows, dim: of all that the streams hold.
        chosen: sorted int64 positions; None: all rows.
        first: the first wanted column; ``after`` tells how many.
        before: predecessors of the chosen rows and columns; None: there are none.
        after: set to the chosen rows and columns.

    Raises:
        ValueError: no encoder writes such streams, or not upon these predecessors; ``after`` has
            no meaning then.
    """
    if not has_extension():
        numpy_rows.apply_streams(data, rows, dim, chosen, first, before, after)
        return
    positions = None if chosen is None else torch.from_numpy(chosen)
    torch.ops.checknrun.delta_apply(
        torch.from_numpy(data),
        rows,
        dim,
        positions,
        first,
        *_tensors(before),
        *_tensors(after),
        BUILD,
    )


def stream_sizes(symbols: np.ndarray, dim: int) -> list[int]:
    """Return the bytes of all streams, in their order.

    Raises:
        ValueError: a symbol is unknown, or dim out of range.
    """
    if not has_extension():
        return layout.stream_sizes(symbols, dim)
    sizes: list[int] = torch.ops.checknrun.delta_sizes(torch.from_numpy(symbols), dim)
    return sizes


def values_of(rows: Grid, out: np.ndarray) -> None:
    """Write rows as numbers.

    Args:
        out: ``(n, dim)`` float32.
    """
    if not has_extension():
        numpy_rows.values_of(rows, out)
        return
    torch.ops.checknrun.delta_values(*_tensors(rows), torch.from_numpy(out), BUILD)


def _tensors(rows: Grid | None) -> tuple[torch.Tensor | None, ...]:
    """Return kind, exponent and codes as the compiled kernel takes them."""
    if rows is None:
        return None, None, None
    parts = ((rows.kind, np.uint8), (rows.exponent, np.int16), (rows.codes, np.int32))
    return tuple(torch.from_numpy(np.ascontiguousarray(part, dtype)) for part, dtype in parts)
