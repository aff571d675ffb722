"""Load the compiled extension, and copy rows' bytes with it, or with NumPy where it is missing.

Copying bytes is all that a restore of rows needs that were stored without a codec. The extension
does it in one pass, without Python's lock; NumPy a block at a time, which stays in the processor's
cache until the block is written to its rows.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 19
"""Bytes of rows that are handled at a time."""

Chosen = slice | np.ndarray
"""A choice among rows: a range of positions, or positions, sorted and distinct int64."""


@functools.cache
def has_extension() -> bool:
    """Load the compiled extension; log a warning, once per process, where there is none.

    Returns:
        Whether ``torch.ops.checknrun`` can be used.
    """
    for library in sorted(Path(__file__).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(library)
        except OSError as error:
            logger.warning("%s can't be loaded: %s", library, error)
            continue
        if hasattr(torch.ops.checknrun, "stage_rows"):
            return True
        logger.warning("%s was built for another version of this package: ignored", library)
    logger.warning(
        "rows are quantized by NumPy, several times slower than by the compiled kernel: install "
        "torchrec_checknrun again where there is a C++ compiler (g++)"
    )
    return False


def can_copy(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Tell whether ``copy_rows`` can copy: both tensors contiguous, on the CPU, and not empty."""
    return all(
        rows.device.type == "cpu" and rows.is_contiguous() and rows.numel() > 0
        for rows in (source, target)
    )


def copy_rows(
    source: torch.Tensor, rows: int, chosen: Chosen, target: torch.Tensor, where: Chosen
) -> None:
    """Overwrite rows of a tensor with rows of another one, byte for byte.

    Args:
        source: of any shape, as ``rows`` rows of bytes; see ``can_copy``.
        rows: number of rows of ``source``.
        chosen: the rows of ``source``.
        target: ``(m,)`` or ``(m, cols)``, with rows of as many bytes; see ``can_copy``.
        where: the rows of ``target``, as many as ``chosen``.

    Raises:
        IndexError, ValueError: rows are out of range, or differ in bytes.
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
        raise ValueError(f"rows have {stored.itemsize} bytes, their target {memory.itemsize}")
    if isinstance(chosen, slice):
        memory[where] = stored[chosen]
        return
    size = max(1, BLOCK_BYTES // stored.itemsize)
    for start in range(0, len(chosen), size):
        block = chosen[start : start + size]
        memory[part_of(where, start, start + len(block))] = stored[block]


def part_of(chosen: Chosen, start: int, stop: int) -> Chosen:
    """Return chosen rows ``start`` to ``stop``, counted among the chosen."""
    if isinstance(chosen, slice):
        return slice(chosen.start + start, chosen.start + stop)
    return chosen[start:stop]


def _count(chosen: Chosen) -> int:
    return chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)


def _places(chosen: Chosen) -> tuple[int, torch.Tensor | None]:
    """Return the first row of a range, or all positions, as the extension takes them."""
    return (chosen.start, None) if isinstance(chosen, slice) else (0, torch.from_numpy(chosen))


def _items(tensor: torch.Tensor, rows: int) -> np.ndarray:
    """View a tensor as one item per row, which NumPy copies as fast as memory allows."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if len(data) % rows:
        raise ValueError(f"{len(data)} bytes are no multiple of {rows} rows")
    return data.view(f"V{len(data) // rows}")
