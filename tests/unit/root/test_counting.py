"""Count what was committed, whoever can read it, and commit nothing that would not count."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.root.commits import commit
from tests.unit.root.writers import nothing
from torchrec_checknrun.errors import SaveFailed, StorageFailed
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root import counting, writer
from torchrec_checknrun.root.checkpoints import has_manifest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import Lease


def uncommitted(root: Folder) -> Manifest:
    """Write a checkpoint's files; return the manifest that would commit them."""
    made = commit(root)
    (root / made.id).delete(MANIFEST_NAME)
    return made


def test_the_highest_epoch_is_that_of_any_checkpoint(disk: Folder) -> None:
    disk.create()
    assert counting.highest_epoch(disk) == 0
    for epoch in (1, 3, 2):
        commit(disk, epoch)
    assert counting.highest_epoch(disk) == 3


def test_no_checkpoint_is_passed_over_because_storage_fails(
    disk: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.create()
    ids = [commit(disk).id for _ in range(3)]
    read = counting.read_manifest

    def fail_once(root: Folder, name: str) -> Manifest:
        if name == ids[1]:
            raise StorageFailed("says the test")
        return read(root, name)

    monkeypatch.setattr(counting, "read_manifest", fail_once)
    with pytest.raises(StorageFailed, match="says the test"):
        list(counting.counting(disk, None))
    assert [*counting.counting_ids(disk, None)] == ids[::-1]


def test_nothing_is_committed_whose_files_are_gone(disk: Folder) -> None:
    disk.create()
    made = uncommitted(disk)
    (disk / made.id).delete(made.files[0].name)
    with pytest.raises(SaveFailed, match="went away while it was written"):
        writer.commit(disk, disk / made.id, made)
    assert not has_manifest(disk, made.id)


def test_a_commit_that_a_claim_has_overtaken_fails(disk: Folder) -> None:
    disk.create()
    made, lease = uncommitted(disk), Lease(disk)
    with pytest.raises(SaveFailed, match=f"claimed .* while {made.id} was committed"):
        writer.commit(disk, disk / made.id, made, before=[lambda: lease.acquire(nothing)])
    later = uncommitted(disk)
    admitted = replace(later, epoch=lease.claim.epoch).sealed()
    writer.commit(disk, disk / later.id, admitted)
    assert [*counting.counting(disk, lease.claim)] == [admitted]
    lease.release()
