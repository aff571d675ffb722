"""Refuse a root that not all ranks see, where each rank would restore or start a run of its own."""

from __future__ import annotations

import errno
import socket
import time
from itertools import islice
from typing import NamedTuple

from torchrec_checknrun.errors import CheckNRunError, RootNotShared, StorageFailed
from torchrec_checknrun.ranks import Ranks, listed, ranks_text
from torchrec_checknrun.root.checkpoints import committed, has_manifest
from torchrec_checknrun.store.folder import Folder

PATIENCE_SECONDS = 40.0
"""Seconds that a file may stay unseen on other ranks: network file systems cache a directory's
entries for half a minute.
"""
_PAUSE = 0.25
"""Seconds between two looks."""
_REMEDY = (
    "Give a folder on a file system that all machines mount, or an object store such as "
    "s3://bucket/run-17"
)


class _View(NamedTuple):
    """One rank's look at a file.

    Attributes:
        sees: whether the file is there.
        problem: why the rank can't tell; empty where it can.
        waits: whether the next look may tell otherwise.
    """

    sees: bool
    host: str
    problem: str = ""
    waits: bool = False


def require_shared(root: Folder, ranks: Ranks, folder_name: str, file: str) -> bool:
    """Refuse a root that not all ranks see alike. A collective.

    Args:
        folder_name: a folder of the root.
        file: a file in that folder that rank 0 has seen; other ranks' argument is ignored.

    Returns:
        False where rank 0 doesn't see the file any more: somebody has deleted it.

    Raises:
        RootNotShared: some ranks don't see the file; names the ranks and hosts.
        StorageFailed: a rank could not look; names the rank, its host and the cause.
    """
    if ranks.world_size == 1:
        return True
    folder, name = root / folder_name, ranks.from_rank_0(lambda: file)
    # The other ranks wait for the answer, and not for longer than the root's time limit.
    deadline = time.monotonic() + min(PATIENCE_SECONDS, folder.patience.timeout_seconds / 2)
    while True:
        views = ranks.gather(_look(folder, name, deadline))
        first = views[0]
        if not (first.sees or first.problem):
            return False
        refused = any(view.problem and not view.waits for view in views)
        if refused or not any(view.waits for view in views):
            break
        time.sleep(_PAUSE)
    for rank, view in enumerate(views):
        if view.problem:
            raise StorageFailed(
                errno.EIO, f"rank {rank} on {view.host} can't read {folder}/{name}: {view.problem}"
            )
    blind = [rank for rank, view in enumerate(views) if not view.sees]
    if blind:
        hosts = sorted({views[rank].host for rank in blind})
        raise RootNotShared(
            f"{root} is not shared storage: rank 0 on {first.host} sees {folder}/{name}, "
            f"{ranks_text(blind)} on {listed(hosts)} can't. {_REMEDY}"
        )
    return True


def require_nowhere(root: Folder, ranks: Ranks) -> None:
    """Refuse a root without committed checkpoints on rank 0 if another rank sees one. A collective.

    Raises:
        RootNotShared: names the rank and host that see a checkpoint.
    """
    if ranks.world_size == 1:
        return

    def look() -> tuple[str, list[str]]:
        names = (name for name in committed(root) if has_manifest(root, name))
        return socket.gethostname(), list(islice(names, 1))

    found = ranks.on_all_ranks(look)
    others = [rank for rank, (_, names) in enumerate(found) if names]
    if others and not found[0][1]:
        host, names = found[others[0]]
        raise RootNotShared(
            f"{root} is not shared storage: rank {others[0]} on {host} sees {names[0]}, rank 0 on "
            f"{found[0][0]} sees no checkpoint. {_REMEDY}"
        )


def _look(folder: Folder, name: str, deadline: float) -> _View:
    """Look once for a file, which may still come until the deadline."""
    host, waits = socket.gethostname(), time.monotonic() < deadline
    try:
        folder.read(name, 0, 1)
        return _View(True, host)
    except FileNotFoundError:
        return _View(False, host, waits=waits)
    except (OSError, CheckNRunError) as error:
        refused = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM)
        return _View(False, host, str(error), waits and not refused)
