"""Work as a user whom modes of files bind: root may read and write all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def bound() -> Iterator[None]:
    """Run a block, with all threads, as a user without rights where this one is root."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def folder_of_bound() -> Iterator[Path]:
    """Make a folder that ``bound`` blocks reach and own; pytest's are in one that root keeps."""
    path = Path(tempfile.mkdtemp(prefix="checknrun-rights-"))
    if os.geteuid() == 0:
        os.chown(path, _NOBODY, _NOBODY)
    try:
        with bound():
            try:
                os.listdir(path)
            except PermissionError:
                pytest.skip(f"a user without rights doesn't reach {path}: set TMPDIR")
        yield path
    finally:
        for folder, names, _ in os.walk(path):
            for name in names:
                with suppress(OSError):
                    os.chmod(Path(folder) / name, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def forbid(*paths: Path) -> None:
    """Take all rights to files and directories away, from their owner, too."""
    for path in paths:
        path.chmod(0)
