"""Rows' bytes from chosen places to chosen places: what a restore of rows that need no decoding is.

The extension does it in one pass, without Python's lock; NumPy a block at a time, which stays in
the processor's cache until it is written to its rows.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 19
"""Of rows that are handled together."""

Chosen = slice | np.ndarray
"""Some of several rows: a range of positions, or positions, sorted and distinct int64."""


def can_copy(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether both are in one piece on the CPU and have content: else torch must copy."""
    return all(
        rows.device.type == "cpu" and rows.is_contiguous() and rows.numel() > 0
        for rows in (source, target)
    )


def copy_rows(
    source: torch.Tensor, rows: int, chosen: Chosen, target: torch.Tensor, where: Chosen
) -> None:
    """Overwrites rows of a tensor with rows of another one, byte for byte.

    Args:
        source: as ``can_copy`` wants it, of any shape: ``rows`` rows of bytes.
        target: ``(m,)`` or ``(m, cols)``, its rows of as many bytes.
        chosen, where: as many rows of each.

    Raises:
        IndexError, ValueError: there are no such rows.
    """
    n = _count(chosen)
    assert n == _count(where)
    if has_extension():
        first, positions = _places(chosen)
        into, ids = _places(where)
        torch.ops.checknrun.copy_rows(source, rows, first, positions, target, into, ids, n)
        return
    stored, memory = _items(source, rows), _items(target, len(target))
    if stored.itemsize != memory.itemsize:
        raise ValueError(f"rows of {stored.itemsize} bytes to others of {memory.itemsize}")
    if isinstance(chosen, slice):
        memory[where] = stored[chosen]
        return
    size = max(1, BLOCK_BYTES // stored.itemsize)
    for start in range(0, len(chosen), size):
        block = chosen[start : start + size]
        memory[part_of(where, start, start + len(block))] = stored[block]


def part_of(chosen: Chosen, start: int, stop: int) -> Chosen:
    """Of chosen rows some that follow each other."""
    if isinstance(chosen, slice):
        return slice(chosen.start + start, chosen.start + stop)
    return chosen[start:stop]


def _count(chosen: Chosen) -> int:
    return chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)


def _places(chosen: Chosen) -> tuple[int, torch.Tensor | None]:
    """The first row, or all of them."""
    return (chosen.start, None) if isinstance(chosen, slice) else (0, torch.from_numpy(chosen))


def _items(tensor: torch.Tensor, rows: int) -> np.ndarray:
    """An item for each row, which NumPy copies as fast as memory goes."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if len(data) % rows:
        raise ValueError(f"{len(data)} bytes aren't {rows} rows")
    return data.view(f"V{len(data) // rows}")


@functools.cache
def has_extension() -> bool:
    """Whether the compiled kernel is there; says so once if it isn't."""
    for library in sorted(Path(__file__).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(library)
        except OSError as error:
            logger.warning("%s can't be loaded: %s", library, error)
            continue
        if hasattr(torch.ops.checknrun, "stage_rows"):
            return True
        logger.warning("%s is of an earlier version of this package", library)
    logger.warning(
        "rows are quantized by NumPy, which is several times slower: install "
        "torchrec_checknrun where there is a C++ compiler (g++) to have the compiled kernel"
    )
    return False
