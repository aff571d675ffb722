"""Tell URLs from paths, and open them as fsspec does."""

from __future__ import annotations

import re

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from torchrec_checknrun.store.retry import masked

_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]*):/(?!/)", re.IGNORECASE)


def require_slashes(url: str) -> None:
    """Refuse a URL that would be taken for a path: checkpoints would lie on this disk, unnoticed.

    Raises:
        ValueError: names what was meant.
    """
    lost = _LOST_SLASH.match(url)
    if lost and lost[1].lower() in {*fsspec.available_protocols()} - {"file", "local"}:
        meant = masked(f"{lost[1]}://{url[lost.end() :]}")
        raise ValueError(
            f"{meant.replace('//', '/', 1)!r} would be a folder on this machine: give the URL "
            f"{meant!r}, as a string, since pathlib.Path takes one of its slashes away"
        )


def opened(url: str) -> tuple[AbstractFileSystem, str]:
    """Open a URL; return its file system and path.

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
