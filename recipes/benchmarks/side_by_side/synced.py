"""Change torchsnapshot so that its commits are on the disk.

torchsnapshot 0.1.0 never syncs a file; all others do before a checkpoint can be listed, as the
column "durable after" requires. So the rank that commits, once all have written, syncs the files
(on one machine the other ranks' too) before it writes the marker, and then the marker itself.
``take`` waits for that, as ``dcp.save`` waits for its own; ``async_take`` does it in its background
thread.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@functools.cache
def synced_snapshot() -> Any:
    """Return the changed class ``Snapshot``."""
    found = importlib.import_module("torchsnapshot").Snapshot
    commit = found._write_snapshot_metadata

    def synced(snapshot_metadata: object, storage: Any, event_loop: object) -> None:
        written = _files(Path(storage.root))
        _sync(written)
        commit(snapshot_metadata=snapshot_metadata, storage=storage, event_loop=event_loop)
        _sync(_files(Path(storage.root)) - written)

    found._write_snapshot_metadata = staticmethod(synced)
    return found


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
