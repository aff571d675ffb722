"""Tell URLs from paths, and open them as fsspec does."""

from __future__ import annotations

import errno
import os
import re

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.retry import masked

_RELATIVE = re.compile(r"(file|local)://(?!/)")
_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]*):/(?!/)", re.IGNORECASE)


def require_place(url: str) -> None:
    """Refuse a URL that would be taken for the working directory, or for a path of its own there,
    where nobody looks for checkpoints.

    Raises:
        ValueError: names what was meant.
    """
    if not url.strip():
        raise ValueError(
            f"{url!r} names no folder: give a path or URL, or '.' for the working directory; "
            "perhaps a variable is not set"
        )
    if relative := _RELATIVE.match(url):
        raise ValueError(
            f"{url!r} would be a folder in the working directory: give a path, or "
            f"{relative[1]}:///… with a third slash before a path from the top"
        )
    lost = _LOST_SLASH.match(url)
    if lost and lost[1].lower() in {*fsspec.available_protocols()} - {"file", "local"}:
        meant = masked(f"{lost[1]}://{url[lost.end() :]}")
        raise ValueError(
            f"{meant.replace('//', '/', 1)!r} would be a folder on this machine: give the URL "
            f"{meant!r}, as a string, since pathlib.Path takes one of its slashes away"
        )


def opened(url: str) -> tuple[AbstractFileSystem, str]:
    """Open a URL; return its file system and path.

    Raises:
        StorageFailed: a path begins in the working directory, and that is gone.
    """
    try:
        return _opened(url)
    except FileNotFoundError as error:
        if os.path.isabs(url) or _is_there():
            raise
        raise StorageFailed(
            errno.ENOENT,
            f"{masked(url)} begins in this process's working directory, which is gone: give the "
            "whole path, or change to a directory that is there",
        ) from error


def _is_there() -> bool:
    """Tell whether the working directory is there."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _opened(url: str) -> tuple[AbstractFileSystem, str]:
    """Open a URL.

    For fsspec ``::`` separates the parts of a chain, also in the middle of a path on a disk, of
    which it would open the first part: runs in ``a::1`` and ``a::2`` would share a folder.
    """
    first, chain, _ = url.partition("::")
    if chain and (first.startswith("file:") or ("/" in first and "://" not in first)):
        disk = LocalFileSystem()
        return disk, disk._strip_protocol(url)
    found: tuple[AbstractFileSystem, str] = fsspec.core.url_to_fs(url)
    return found


def parts_of(url: str) -> tuple[str, str, str]:
    """Split a URL into its path (with the host), the part before and the part after.

    In a chain, as ``simplecache::s3://bucket/run`` or ``zip://run::file:///a.zip``, the path is the
    first one.
    """
    before = ""
    while "::" in url and "/" not in url.partition("::")[0]:
        first, _, url = url.partition("::")
        before += f"{first}::"
    url, chain, after = url.partition("::")
    protocol, separator, path = url.rpartition("://")
    return before + protocol + separator, path.rstrip("/"), chain + after
