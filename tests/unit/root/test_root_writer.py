"""A run's right to its root ends with the run, whatever failed in between."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from tests.unit.root.commits import commit
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root import writer as root_writer
from torchrec_checknrun.root.lineage import Lineage
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.root.writer import RootWriter
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.claims import latest_claim


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    root = Folder(tmp_path / "run")
    root.create()
    return root


def is_free(root: Folder) -> bool:
    claim = latest_claim(root)
    return claim is not None and claim.released


def test_a_claim_on_storage_that_fails_is_given_up(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = Lineage()
    lineage.committed(commit(root))
    writer = RootWriter(root, lineage, None)

    def fail(root: Folder, manifest: Manifest) -> dict[str, int]:
        raise StorageFailed(errno.EIO, "says the test")

    with monkeypatch.context() as patch:
        patch.setattr(root_writer, "sizes_of", fail)
        with pytest.raises(StorageFailed, match="says the test"):
            writer.claim()
    assert is_free(root)
    writer.claim()
    assert not is_free(root)
    writer.close()
    assert is_free(root)


def test_a_system_without_threads_for_pruning(
    root: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is committed all the same; a later commit prunes."""
    writer, start = RootWriter(root, Lineage(), Retention(1)), threading.Thread.start
    writer.claim()

    def none_for_pruning(thread: threading.Thread) -> None:
        if thread.name == "checknrun-prune":
            raise RuntimeError("can't start new thread")
        start(thread)

    made = [commit(root, writer.epoch) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_for_pruning)
        writer.prune(made[-1])
    assert "the next commit tries again: can't start new thread" in caplog.text
    writer.wait_for_pruning()
    assert (root / made[0].id).names()
    writer.prune(made[-1])
    writer.wait_for_pruning()
    assert not (root / made[0].id).names()
    writer.close()
    assert is_free(root)
