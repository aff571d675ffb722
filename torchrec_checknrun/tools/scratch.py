"""Keep tensors in files of this machine whose space is taken before they are mapped.

So a full disk is an error; met while mapped memory is written, it would end the process (SIGBUS).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

from torchrec_checknrun.store.retry import storage_failed

_NO_RESERVATION = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems that can't take space beforehand."""


def file_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in a new file.

    Raises:
        StorageFailed: the file can't be made, or there is no space for it.
    """
    size = torch.Size(shape).numel()
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        with path.open("xb") as file:
            _reserve(file.fileno(), size * dtype.itemsize)
    except OSError as error:
        raise storage_failed(
            error,
            f"making the scratch file {path} of {size * dtype.itemsize / 1e6:.3g} MB (TMPDIR in "
            "the environment names another folder, as `--scratch` of `checknrun export` does)",
        ) from error
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def _reserve(descriptor: int, size: int) -> None:
    """Take space for a file, where the system can."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NO_RESERVATION:
            raise
