"""Rows' bytes from chosen places to chosen places: what a restore of rows that need no decoding is.

The extension does it in one pass, without Python's lock; NumPy a block at a time, which stays in
the processor's cache until it is written to its rows.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from pathlib import Path

import numpy as np
import torch

from torchrec_checknrun.version import __version__

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
    """Load the compiled kernel and tell whether it can be used; warn once if not, and say how to
    build the kernel.
    """
    reason = "is missing"
    for library in sorted(Path(__file__).parent.glob("_C*.so")):
        reason = _load(library)
        if not reason:
            return True
    logger.warning(
        "the compiled kernel %s: NumPy quantizes rows, which is several times slower. Build the "
        "kernel with g++: %s",
        reason,
        build_command(),
    )
    return False


def _load(library: Path) -> str:
    """Load a library.

    Returns:
        The reason why it can't be used; empty if it can. A library for another torch is not even
        loaded: its calls would reach functions and layouts that have changed.
    """
    built = re.search(rb"checknrun: built for torch ([^;]+);", library.read_bytes())
    if built and _minor(built[1].decode()) != _minor(torch.__version__):
        return (
            f"({library}) was built for torch {built[1].decode()} and is not used with torch "
            f"{torch.__version__}"
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"({library}) can't be loaded ({error})"
    if not hasattr(torch.ops.checknrun, "stage_rows"):
        return f"({library}) is of an earlier version of this package"
    return ""


def _minor(version: str) -> list[str]:
    """Return the part of torch's version within which its binary interface stays."""
    return version.split(".")[:2]


def build_command() -> str:
    """Return the command that builds the kernel for the torch that is installed."""
    root = Path(__file__).resolve().parents[1]
    if (root / "setup.py").is_file():
        return f"cd {root} && {sys.executable} setup.py build_ext --inplace"
    return (
        f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall "
        f"torchrec_checknrun-{__version__}.tar.gz  (the source archive)"
    )
