"""Prune old checkpoints and leftovers of crashed saves, and keep pinned ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.chains import write
from tests.unit.root.commits import ROWS, commit, leftover, part, write_full
from torchrec_checknrun.errors import CheckpointNotFound, RootInUse, UnsupportedFormat
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME, PRIORITY_SAVES, checkpoint_id, new_id
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.counting import counting
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, pin, unpin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Holder, Lease


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def fill(root: Folder) -> list[Manifest]:
    """Commit a full checkpoint, two based on it, and another full one."""
    root.create()
    first = write(root, ROWS, part())
    second = write(root, ROWS, part(5), first)
    third = write(root, ROWS, part(4), second)
    fourth = write_full(root, third)
    return [first, second, third, fourth]


def test_what_is_not_needed_goes(root: Folder) -> None:
    first, second, third, fourth = fill(root)
    (root / "my notes").create()
    dry = prune(root, Retention(1), dry_run=True)
    assert committed(root) == [fourth.id, third.id, second.id, first.id]
    done = prune(root, Retention(1))
    assert done == dry
    assert list(done.verdict.delete) == [third.id, second.id, first.id]
    assert done.bytes == sum(manifest.stored_bytes for manifest in (first, second, third))
    assert root.names() == ["my notes", fourth.id]
    resolve(root, fourth.id)
    assert prune(root, Retention(1)).verdict.delete == {}


def test_priority_saves_go_with_their_checkpoint(root: Folder) -> None:
    """Delete files as of ranks that a run no longer has; a live checkpoint's stay, and unknown
    ones.
    """
    first, *_, fourth = fill(root)
    saves = root / PRIORITY_SAVES
    for name in (f"{first.id}.run.step-00000009", f"{fourth.id}.run.step-00000019", "notes"):
        (saves / name).create()
        (saves / name).put("rank-00003.bin", b"rows")
    prune(root, Retention(1), dry_run=True)
    assert len(saves.names()) == 3
    prune(root, Retention(1))
    assert saves.names() == ["notes", f"{fourth.id}.run.step-00000019"]
    (saves / "notes").delete("rank-00003.bin")
    (saves / "notes").remove()
    write_full(root, fourth)
    prune(root, Retention(1))
    assert PRIORITY_SAVES not in root.names()


def test_pins_keep_checkpoints(root: Folder) -> None:
    first, second, third, fourth = fill(root)
    pin(root, second.id)
    assert list(prune(root, Retention(1)).verdict.delete) == [third.id]
    resolve(root, second.id)
    unpin(root, second.id)
    unpin(root, second.id)
    assert list(prune(root, Retention(1)).verdict.delete) == [second.id, first.id]
    assert root.names() == [fourth.id]
    with pytest.raises(CheckpointNotFound):
        pin(root, first.id)


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_a_pinned_one_of_a_replaced_writer_needs_stays(root: Folder, by_hand: bool) -> None:
    root.create()
    first = write(root, ROWS, part())
    late = write(root, ROWS, part(3), first)
    lease = Lease(root)
    lease.acquire(lambda _: [first.id])
    newer = [late]
    for _ in range(3):
        newer.append(write_full(root, newer[-1], epoch=lease.claim.epoch))
    pin(root, late.id)
    own = lease.claim
    if by_hand:
        lease.release()
    done = prune(root, Retention(2), own=None if by_hand else own)
    assert list(done.verdict.delete) == [newer[1].id]
    assert done.verdict.keep[late.id] == "pinned"
    assert done.verdict.keep[first.id] == f"{late.id} needs it"
    resolve(root, late.id)
    unpin(root, late.id)
    # A run keeps the checkpoints that it ignores, and deletes their useless parents.
    gone = [late.id, first.id] if by_hand else [first.id]
    assert list(prune(root, Retention(2), own=None if by_hand else own).verdict.delete) == gone
    lease.release()


def test_leftovers_of_crashed_saves(root: Folder) -> None:
    *_, fourth = fill(root)
    crashed, running = leftover(root, 2), leftover(root, 9)
    assert prune(root, Retention(9), below=9).leftovers == (crashed,)
    assert running in root.names()
    assert crashed not in root.names()
    assert prune(root, Retention(9)).leftovers == (running,)
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == fourth.id


@pytest.mark.parametrize("keep", [1, 9])
def test_a_lost_manifest_makes_no_leftover_of_a_needed_checkpoint(root: Folder, keep: int) -> None:
    root.create()
    first = write(root, ROWS, part())
    second = write(root, ROWS, part(5), first)
    manifest = (root / first.id).read(MANIFEST_NAME)
    (root / first.id).delete(MANIFEST_NAME)
    done = prune(root, Retention(keep), below=9)
    assert done.leftovers == ()
    assert f"{first.id} stays: {second.id} builds on it" in "\n".join(done.problems)
    (root / first.id).put(MANIFEST_NAME, manifest)
    resolve(root, second.id)

    (root / first.id).delete(MANIFEST_NAME)
    write_full(root, second)
    assert set(prune(root, Retention(1)).verdict.delete) == {second.id}
    assert first.id not in root.names()  # nobody needs it any more


def test_lost_manifests_of_a_whole_chain_delete_none_of_it(root: Folder) -> None:
    root.create()
    crashed = leftover(root, 1)
    ids, manifests = [write(root, ROWS, part())], {}
    ids += [write(root, ROWS, part(5), ids[0])]
    ids += [write(root, ROWS, part(7), ids[1])]
    for lost in ids[:2]:
        manifests[lost.id] = (root / lost.id).read(MANIFEST_NAME)
        (root / lost.id).delete(MANIFEST_NAME)
    done = prune(root, Retention(9), below=9)
    assert done.leftovers == ()
    assert "put that back" in "\n".join(done.problems)
    for id, manifest in manifests.items():
        (root / id).put(MANIFEST_NAME, manifest)
    assert prune(root, Retention(9), below=9).leftovers == (crashed,)
    resolve(root, ids[2].id)


def test_a_file_of_a_checkpoint_s_name_is_no_leftover(root: Folder) -> None:
    fill(root)
    name = checkpoint_id(2, 7, "00000abc")
    root.put(name, b"somebody's")
    assert prune(root, Retention(9)).leftovers == ()
    assert root.read(name) == b"somebody's"


def test_a_live_writer_s_directory_is_no_leftover(root: Folder) -> None:
    fill(root)
    mine = leftover(root, 9)
    lease = Lease(root)
    lease.acquire(lambda _: committed(root))
    try:
        assert prune(root, Retention(9)).leftovers == ()
        assert prune(root, Retention(9), own=lease.claim).leftovers == (mine,)
    finally:
        lease.release()


def test_a_compaction_s_directory_is_no_leftover(root: Folder) -> None:
    fill(root)
    name = leftover(root, 3)
    lease = Lease(root / name)
    lease.acquire(lambda _: ())
    assert prune(root, Retention(9)).leftovers == ()
    lease.release(forget=True)
    assert FOLDER not in (root / name).names()
    assert prune(root, Retention(9)).leftovers == (name,)
    assert name not in root.names()


def test_a_compaction_that_has_only_begun_is_no_leftover(root: Folder) -> None:
    """Leave the directory in which the run's own compaction has yet to make its claim."""
    *_, third, _ = fill(root)
    begun, crashed = (new_id(n, n, compacted=True) for n in (third.sequence, third.sequence - 1))
    for name in (begun, crashed):
        (root / name).create()
    lease = Lease(root)
    lease.acquire(lambda _: committed(root))
    try:
        done = prune(root, Retention(9), own=lease.claim, copies_of=[third.sequence])
    finally:
        lease.release()
    assert done.leftovers == (crashed,)
    assert begun in root.names()


def test_what_a_writer_was_restored_from_stays(root: Folder) -> None:
    first, second, third, fourth = fill(root)
    lease = Lease(root)
    lease.acquire(lambda _: committed(root), uses=[first.id, second.id])
    try:
        assert list(prune(root, Retention(1)).verdict.delete) == [third.id]
    finally:
        lease.release()
    assert list(prune(root, Retention(1), in_use={first.id}).verdict.delete) == [second.id]
    resolve(root, fourth.id)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_what_somebody_else_has_deleted_is_not_counted(root: Folder, all_of_it: bool) -> None:
    """Ignore a checkpoint that a person has deleted, perhaps in part, and the run remembers."""
    root.create()
    made = [write(root, ROWS, part())]
    for _ in range(3):
        made.append(write_full(root, made[-1]))
    known: dict[str, Manifest] = {}
    lease = Lease(root)
    lease.acquire(lambda _: committed(root))
    prune(root, Retention(4), own=lease.claim, known=known)
    assert len(known) == 4
    for name in (root / made[2].id).names() if all_of_it else [MANIFEST_NAME]:
        (root / made[2].id).delete(name)
    done = prune(root, Retention(2), own=lease.claim, known=known)
    lease.release()
    assert list(done.verdict.keep) == [made[3].id, made[1].id]
    assert list(done.verdict.delete) == [made[0].id]
    assert done.leftovers == (made[2].id,)
    assert root.names() == [made[1].id, made[3].id, FOLDER]
    assert known.keys() == {made[0].id, made[1].id, made[3].id}


def test_a_replaced_writer_deletes_nothing(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fill(root)
    old = Lease(root)
    old.acquire(lambda _: ())
    claim = old.claim
    old.release()
    holder = Holder("another", 0, "far", "another", 1, 1)
    monkeypatch.setattr(Holder, "this_process", classmethod(lambda cls: holder))
    new = Lease(root)
    new.acquire(lambda _: [manifest.id for manifest in made])
    with pytest.raises(RootInUse, match="another writer"):
        prune(root, Retention(1), own=claim)
    assert len(committed(root)) == 4
    new.release()


def test_damaged_checkpoints_are_not_counted(root: Folder) -> None:
    first, second, third, fourth = fill(root)
    (root / fourth.id).delete("rank-00000.bin")
    assert prune(root, Retention(1)).verdict.delete == {}
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == third.id
    assert {first.id, second.id} < set(root.names())


def test_a_manifest_that_was_cut_meanwhile_is_not_counted(root: Folder) -> None:
    """Keep what a restore would choose, although the run remembers the manifest as it was."""
    made = [commit(root) for _ in range(4)]
    lease = Lease(root)
    lease.acquire(lambda _: [manifest.id for manifest in made])
    known: dict[str, Manifest] = {}
    prune(root, Retention(9), own=lease.claim, known=known)
    assert len(known) == 4
    path = root / made[2].id
    path.put(MANIFEST_NAME, path.read(MANIFEST_NAME)[:-20])
    done = prune(root, Retention(2), own=lease.claim, known=known)
    lease.release()
    assert list(done.verdict.delete) == [made[0].id]


@pytest.mark.parametrize("stop_after", range(8))
def test_a_crash_half_way_leaves_whole_chains(
    root: Folder, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, fourth = fill(root)
    deleted: list[str] = []
    delete = Folder.delete

    def crash(folder: Folder, name: str) -> None:
        if len(deleted) == stop_after:
            raise KeyboardInterrupt
        deleted.append(name)
        delete(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "delete", crash)
        try:
            prune(root, Retention(1))
        except KeyboardInterrupt:
            assert stop_after < 6
        else:
            assert len(deleted) == 6
    for name in committed(root):
        if (root / name).size(MANIFEST_NAME) is not None:
            resolve(root, name)
    prune(root, Retention(1))
    assert root.names() == [fourth.id]


def test_what_a_replaced_writer_has_committed(root: Folder) -> None:
    """Ignore a replaced writer's checkpoint in a run; delete it when pruning by hand."""
    first, second, third, fourth = fill(root)
    fifth = write(root, ROWS, part(3), fourth)
    lease = Lease(root)
    lease.acquire(lambda _: [first.id, second.id, third.id])  # the other checkpoints came too late
    done = prune(root, Retention(1), own=lease.claim)
    assert set(done.verdict.keep) == {first.id, second.id, third.id}
    assert done.verdict.delete == {}
    pin(root, fifth.id)
    assert prune(root, Retention(1)).verdict.delete == {}  # the pinned checkpoint needs the fourth
    unpin(root, fifth.id)
    planned = prune(root, Retention(1), dry_run=True)
    assert list(planned.verdict.delete) == [fifth.id, fourth.id]
    assert planned.bytes == fifth.stored_bytes + fourth.stored_bytes
    assert prune(root, Retention(1)) == planned
    assert committed(root) == [third.id, second.id, first.id]
    lease.release()


def test_a_replaced_writer_s_checkpoint_goes_with_what_builds_on_it(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delete children before parents where a merge of two copies of a root has mixed writers."""
    first = write(root, ROWS, part())
    second = write(root, ROWS, part(3), first)
    lease = Lease(root)
    lease.acquire(lambda _: [first.id])
    third = write(root, ROWS, part(3), second, epoch=lease.claim.epoch)
    newest = write_full(root, third, epoch=lease.claim.epoch)
    lease.release()
    gone: list[str] = []
    real = Folder.delete

    def delete(folder: Folder, name: str) -> None:
        if name == MANIFEST_NAME:
            gone.append(folder.name)
        real(folder, name)

    monkeypatch.setattr(Folder, "delete", delete)
    prune(root, Retention(1))
    assert gone == [third.id, second.id, first.id]
    assert committed(root) == [newest.id]


def test_a_replaced_writer_s_checkpoint_counts_once_it_was_restored(root: Folder) -> None:
    """Keep a replaced writer's checkpoint once restored: later checkpoints build on it."""
    first, second, third, fourth = fill(root)
    lease = Lease(root)
    lease.acquire(lambda _: [first.id, second.id, third.id])
    lease.use([fourth.id])
    fifth = write(root, ROWS, part(3), fourth, epoch=lease.claim.epoch)
    lease.use([])
    assert set(prune(root, Retention(1), own=lease.claim).verdict.keep) == {fourth.id, fifth.id}
    lease.release()
    after = Lease(root)
    after.acquire(lambda before: [m.id for m in counting(root, before)], uses=[fifth.id])
    assert after.claim.earlier == (fifth.id, fourth.id)
    after.release()
    assert prune(root, Retention(1)).verdict.delete == {}
    assert committed(root) == [fifth.id, fourth.id]


def test_a_newer_release_s_checkpoint_keeps_everything(root: Folder) -> None:
    """Delete nothing beside a newer release's checkpoint, whose needs only that release knows."""
    first, *_ = made = fill(root)
    data = (root / first.id).read(MANIFEST_NAME)
    name = checkpoint_id(9, 90, "00000abc")
    (root / name).create()
    (root / name).put(MANIFEST_NAME, data.replace(b'"format_version":1', b'"format_version":9'))
    assert prune(root, Retention(9)).verdict.delete == {}
    for dry_run in (True, False):
        with pytest.raises(UnsupportedFormat, match=r"nothing is deleted .* upgrade"):
            prune(root, Retention(1), dry_run=dry_run)
    assert {manifest.id for manifest in made} < set(root.names())
    (root / name).put(MANIFEST_NAME, b"{}")  # a damaged manifest names no parent
    prune(root, Retention(1))
    assert sorted(root.names()) == sorted([made[-1].id, name])
