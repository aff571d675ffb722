"""Make a root on a disk that fails meanwhile: what is there was made durable, or is made again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.store.folder import Folder


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_its_entry_could_not_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Sync the entry of each new directory at the next try, too, be it a retry."""
    synced: list[str] = []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        if Path(path).is_relative_to(tmp_path):  # leases of other tests' writers sync theirs
            synced.append(path)
            if len(synced) == 2:  # of the root itself
                raise OSError(error, os.strerror(error))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    root = Folder(tmp_path / "runs" / "run")
    if error == errno.EIO:
        with pytest.raises(StorageFailed, match="Input/output"):
            root.create()
    root.create()
    assert (tmp_path / "runs" / "run").is_dir()
    parents = [str(tmp_path), str(tmp_path / "runs")]
    assert synced == [*parents, parents[1]]


def test_nobody_can_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name what is wrong with a root that is there, as on a mount whose server is gone."""
    look, gone = os.stat, str(tmp_path)

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if path == gone:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return look(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(StorageFailed, match="endpoint is not connected"):
        Folder(gone).create()
