"""Refuse a root that not all ranks see, where each rank would restore or start a run of its own."""

from __future__ import annotations

import errno
import socket
import time
from itertools import islice

from torchrec_checknrun.errors import CheckNRunError, RootNotShared, StorageFailed
from torchrec_checknrun.ranks import Ranks, listed, ranks_text
from torchrec_checknrun.root.checkpoints import committed, has_manifest
from torchrec_checknrun.store.folder import Folder

PATIENCE_SECONDS = 40.0
"""Seconds that a file may stay unseen on other ranks: network file systems cache a directory's
entries for half a minute.
"""

_REMEDY = (
    "Give a folder on a file system that all machines mount, or an object store such as "
    "s3://bucket/run-17"
)


def require_shared(root: Folder, ranks: Ranks, folder_name: str, file: str) -> None:
    """Refuse a root that not all ranks see alike. A collective.

    Args:
        folder_name: a folder of the root.
        file: a file in that folder that rank 0 sees; other ranks' argument is ignored.

    Raises:
        RootNotShared: some ranks don't see the file; names the ranks and hosts.
        StorageFailed: a rank could not look; names the rank, its host and the cause.
    """
    if ranks.world_size == 1:
        return
    folder, name = root / folder_name, ranks.from_rank_0(lambda: file)
    seen = ranks.gather((_sees(folder, name), socket.gethostname()))
    for rank, (sees, host) in enumerate(seen):
        if isinstance(sees, str):
            raise StorageFailed(
                errno.EIO, f"rank {rank} on {host} can't read {folder}/{name}: {sees}"
            )
    blind = [rank for rank, (sees, _) in enumerate(seen) if not sees]
    if blind:
        hosts = sorted({seen[rank][1] for rank in blind})
        raise RootNotShared(
            f"{root} is not shared storage: rank 0 on {seen[0][1]} sees {folder}/{name}, "
            f"{ranks_text(blind)} on {listed(hosts)} can't. {_REMEDY}"
        )


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


def _sees(folder: Folder, name: str) -> bool | str:
    """Look for a file until it is there or patience ends; return whether it is, or the error. The
    other ranks wait for the answer, and not for longer than the root's time limit.
    """
    deadline = time.monotonic() + min(PATIENCE_SECONDS, folder.patience.timeout_seconds / 2)
    while True:
        try:
            folder.read(name, 0, 1)
            return True
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return False
        except (OSError, CheckNRunError) as error:
            refused = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM)
            if refused or time.monotonic() > deadline:
                return str(error)
        time.sleep(0.25)
