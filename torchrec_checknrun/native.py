"""Load the compiled extension, and copy rows' bytes with it, or with NumPy where it is missing.

Copying bytes is all that a restore of rows needs that were stored without a codec. The extension
does it in one pass, without Python's lock; NumPy a block at a time, which stays in the processor's
cache until the block is written to its rows.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrec_checknrun.version import __version__, sources_digest

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 19
"""Bytes of rows that are handled at a time."""
_FEW_TENSORS = 100
"""Number of tensors up to which a loop in Python takes less than a call into torch whose code the
processor's caches have lost meanwhile.
"""
Chosen = slice | np.ndarray
"""A choice among rows: a range of positions, or positions, sorted and distinct int64."""


@functools.cache
def has_extension() -> bool:
    """Load the compiled kernel and tell whether it can be used; warn once if not, and say how to
    build the kernel.
    """
    problem = extension_problem()
    if problem:
        logger.warning(
            "the compiled kernel %s: NumPy quantizes rows, which is several times slower. Build "
            "the kernel with g++: %s",
            problem,
            build_command(),
        )
    return not problem


def extension_problem() -> str:
    """Load the compiled kernel; return why that can't be done, empty if it can."""
    problem = "is missing"
    for library in sorted(Path(__file__).parent.glob("_C*.so")):
        problem = _load(library)
        if not problem:
            break
    return problem


def _load(library: Path) -> str:
    """Load a library.

    Returns:
        The reason why it can't be used; empty if it can. A library for another torch, or of the
        sources of another checkout, is not even loaded: its calls would reach functions and layouts
        that have changed.
    """
    try:
        content = library.read_bytes()
    except OSError as error:
        return f"({library}) can't be read ({error})"
    version = _note(rb"for torch", content) or "of an unknown version"
    if _minor(version) != _minor(torch.__version__):
        return (
            f"({library}) was built for torch {version} and is not used with torch "
            f"{torch.__version__}"
        )
    csrc = library.parent / "csrc"  # a wheel has none, and brings its library along
    if csrc.is_dir() and _note(rb"of sources", content) != sources_digest(csrc):
        return f"({library}) was built of other sources than those beside it"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"({library}) can't be loaded ({error})"
    return ""


def _note(what: bytes, content: bytes) -> str:
    """Return what a library says about its build; empty if it doesn't."""
    found = re.search(rb"checknrun: built " + what + rb" ([^;]+);", content)
    return found[1].decode(errors="replace") if found else ""


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


def park_terminated_threads() -> None:
    """Have a thread that PyTorch returns to an interpreter that has ended wait, not abort.

    Without the extension it may abort: the exit code is then that of signal 6.
    """
    if has_extension():
        torch.ops.checknrun.park_terminated_threads()


def can_copy(*tensors: torch.Tensor) -> bool:
    """Tell whether ``copy_rows`` can copy: all tensors contiguous, on the CPU, and not empty."""
    return all(
        rows.device.type == "cpu" and rows.is_contiguous() and rows.numel() > 0 for rows in tensors
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


def try_copy_rows(
    source: torch.Tensor, rows: int, chosen: Chosen, target: torch.Tensor, where: Chosen
) -> bool:
    """Copy rows as ``copy_rows`` does if ``can_copy``; return whether, and copy none if not."""
    if can_copy(source, target):
        copy_rows(source, rows, chosen, target, where)
        return True
    return False


class TensorPlaces:
    """Tells whether tensors, looked at every step, lie where they did; many of them in one call.

    Args:
        tensors: kept, and followed where their Python objects are given other memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._native: Any = None
        self._forms: list[tuple[Any, ...]] = []
        if len(self._tensors) > _FEW_TENSORS and has_extension():
            self._native = torch.classes.checknrun.TensorPlaces(self._tensors)
        else:
            self._forms = [*map(_form, self._tensors)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, as a copy of a tracked model does, with the copies of the tensors."""
        return TensorPlaces, (self._tensors,)

    def same(self) -> bool:
        """Return whether each tensor has the address, dtype, shape and strides it had at first."""
        if self._native is not None:
            return bool(self._native.same(self._tensors))
        return [*map(_form, self._tensors)] == self._forms


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


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
