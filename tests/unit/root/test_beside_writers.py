"""Read and prune a root while others commit, claim and delete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.console import Console
from tests.unit.root.commits import commit, leftover
from tests.unit.root.writers import ELSEWHERE, become
from torchrec_checknrun.errors import (
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    RootInUse,
    StorageFailed,
)
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.reader import read_indexes
from torchrec_checknrun.recovery import missing_root
from torchrec_checknrun.root import chain, deletion
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.writers.claims import Holder, latest_claim
from torchrec_checknrun.writers.lease import FOLDER, Lease


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    root = Folder(tmp_path / "run")
    root.create()
    return root


def finish(root: Folder, name: str, like: Manifest) -> Manifest:
    """Commit a leftover after all."""
    for file in like.files:
        (root / name).put(file.name, (root / like.id).read(file.name))
    late = replace(like, id=name, sequence=int(name[4:10]), step=7).sealed()
    (root / name).put(MANIFEST_NAME, late.to_bytes(), new=True)
    return late


class Once:
    """A wrapper that acts before the first call of a function only."""

    def __init__(self, real: Callable[..., Any], act: Callable[[], object]) -> None:
        self._real = real
        self._to_do = [act]

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._to_do:
            self._to_do.pop()()
        return self._real(*args, **options)


def test_the_newest_while_all_that_was_listed_goes(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root)

    def go_on() -> None:
        commit(root)
        commit(root)
        prune(root, Retention(1))

    monkeypatch.setattr(chain, "resolve", Once(chain.resolve, go_on))
    found, problems = newest(root)
    assert found is not None
    assert found.head.id == committed(root)[0]
    assert not problems


def test_the_newest_while_it_is_half_deleted(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice changed manifests although the names are the same as before."""
    old = commit(root)
    new = leftover(root, old.sequence + 1)
    real = chain.resolve

    def resolve(folder: Folder, name: str, *more: Any) -> chain.Chain:
        if name == old.id and (root / old.id).size(MANIFEST_NAME) is not None:
            finish(root, new, old)
            (root / old.id).delete(MANIFEST_NAME)
        return real(folder, name, *more)

    monkeypatch.setattr(chain, "resolve", resolve)
    found, _ = newest(root)
    assert found is not None
    assert found.head.id == new


def test_the_newest_while_its_files_go(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinguish a deleted checkpoint from a damaged one, which an older one could replace."""
    commit(root)
    old = commit(root)
    real = chain.check_sizes

    def check_sizes(folder: Folder, manifest: Manifest) -> None:
        if manifest.id == old.id:
            commit(root)
            prune(root, Retention(1))
        real(folder, manifest)

    monkeypatch.setattr(chain, "check_sizes", check_sizes)
    found, problems = newest(root)
    assert found is not None
    assert found.head.id == committed(root)[0]
    assert not problems


def _replaced(root: Folder, monkeypatch: pytest.MonkeyPatch) -> tuple[Manifest, str]:
    """Let a run be replaced as its second save is under way; return its first checkpoint, and the
    name of the second.
    """
    Lease(root).acquire(lambda _: [])
    first = commit(root, epoch=1)
    late = leftover(root, first.sequence + 1)
    become(monkeypatch, **ELSEWHERE)
    return first, late


def _take_over(root: Folder) -> None:
    lease = Lease(root)
    lease.acquire(lambda before: counting_ids(root, before), force=True)
    lease.release()


def test_the_newest_as_its_writer_is_replaced(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass over what is committed after that, though the look began before."""
    first, late = _replaced(root, monkeypatch)

    def go_on() -> None:
        _take_over(root)
        finish(root, late, first)

    monkeypatch.setattr(chain, "find_checkpoints", Once(chain.find_checkpoints, go_on))
    found, problems = newest(root)
    assert found is not None
    assert found.head.id == first.id
    assert problems[0].startswith(f"{late}: it was committed by a writer that had been replaced")


def test_the_newest_as_it_is_adopted(
    root: Folder, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    first, late = _replaced(root, monkeypatch)
    _take_over(root)
    finish(root, late, first)

    def adopt() -> None:
        assert console.run("adopt", root.url, late, "--yes").code == 0

    monkeypatch.setattr(chain, "find_checkpoints", Once(chain.find_checkpoints, adopt))
    found, problems = newest(root)
    assert found is not None
    assert (found.head.id, problems) == (late, [])


def test_a_root_that_never_rests(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover(root, 1)
    real, numbers = chain._newest, iter(range(2, 99))

    def look(*args: Any) -> Any:
        leftover(root, next(numbers))
        return real(*args)

    monkeypatch.setattr(chain, "_newest", look)
    with pytest.raises(StorageFailed, match="come and go"):
        newest(root)


def test_a_fresh_start_beside_a_first_commit(root: Folder) -> None:
    commit(root)
    with pytest.raises(RootInUse, match="was committed"):
        missing_root._describe_uncommitted(root)
    assert "none committed" not in missing_root.describe_empty(root)


def test_a_leftover_that_is_committed_meanwhile(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [commit(root), commit(root)]
    late = leftover(root, 9)
    monkeypatch.setattr(
        deletion,
        "delete_checkpoint",
        Once(deletion.delete_checkpoint, lambda: finish(root, late, made[1])),
    )
    done = prune(root, Retention(1))
    assert list(done.verdict.delete) == [made[0].id]
    assert not done.leftovers
    found, _ = newest(root)
    assert found is not None
    assert found.head.id == late


def test_a_leftover_that_is_committed_while_it_is_deleted(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = commit(root)
    late = leftover(root, 9)
    monkeypatch.setattr(
        deletion, "_delete_files", Once(deletion._delete_files, lambda: finish(root, late, made))
    )
    done = prune(root, Retention(1))
    assert not done.leftovers
    assert "was committed meanwhile" in done.problems[0]
    found, _ = newest(root)
    assert found is not None
    assert found.head.id == late


def test_a_silent_writer_is_fenced(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to report a checkpoint whose files another process has deleted as a leftover."""
    here = Holder.this_process()
    silent = Lease(root, seconds=0.2)
    monkeypatch.setattr(silent, "_renew", lambda: None)
    far = Holder("a run", 0, "far", "another machine", 7, 7)
    monkeypatch.setattr(Holder, "this_process", lambda: far)
    silent.acquire(lambda _: ())
    monkeypatch.setattr(Holder, "this_process", lambda: here)
    kept = commit(root, silent.claim.epoch)
    name = leftover(root, 9)
    claim = f"{root.url}/{FOLDER}/{silent.claim.name}"
    os.utime(claim, (1.0, 1.0))
    assert prune(root, Retention(1), dry_run=True).leftovers == (name,)
    silent.check()
    assert prune(root, Retention(1)).leftovers == (name,)
    with pytest.raises(RootInUse):
        silent.check()
    found, _ = newest(root)
    assert found is not None
    assert found.head.id == kept.id
    silent.release()


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_a_replaced_writer_deletes_no_more(root: Folder, looks: int) -> None:
    """Replace the writer after so many looks at its claim, of which each deletion takes two."""
    made = [commit(root) for _ in range(3)]
    calls = iter([None] * looks + [RootInUse("replaced")])

    def still_ours() -> None:
        error = next(calls)
        if error is not None:
            raise error

    lease = Lease(root)
    lease.acquire(lambda _: committed(root))
    with pytest.raises(RootInUse, match="replaced"):
        prune(root, Retention(1), own=lease.claim, still_ours=still_ours)
    assert len(committed(root)) == 3 - looks // 2
    assert made[2].id in committed(root)
    lease.release()


def test_nothing_is_deleted_where_nothing_counts(root: Folder, console: Console) -> None:
    lease = Lease(root)
    lease.acquire(lambda _: ())
    lease.release()
    late = commit(root)
    hidden = console.run("prune", root.url, "--keep", 1)
    assert hidden.code == 2
    assert f"checknrun adopt {root} {late.id}" in " ".join(hidden.err.split())
    with pytest.raises(IncompatibleCheckpoint):
        prune(root, Retention(1))
    # Delete nothing either when the counting checkpoints are damaged.
    takeover.unlock(root)
    claim = latest_claim(root)
    assert claim is not None
    damaged = commit(root, claim.epoch)
    (root / damaged.id).delete(damaged.files[0].name)
    with pytest.raises(IncompatibleCheckpoint):
        prune(root, Retention(1))
    assert committed(root) == [damaged.id, late.id]


def test_unlock_and_repair_only_what_was_shown(root: Folder) -> None:
    first = Lease(root)
    first.acquire(lambda _: ())
    shown = first.claim.epoch
    first.release()
    second = Lease(root)
    second.acquire(lambda _: (), force=True)
    with pytest.raises(RootInUse, match="meanwhile"):
        takeover.unlock(root, expected=shown)
    with pytest.raises(RootInUse, match="meanwhile"):
        takeover.repair(root, expected=shown)
    second.check()
    takeover.unlock(root, expected=second.claim.epoch)
    with pytest.raises(RootInUse):
        second.check()
    second.release()


def test_a_claim_between_the_decision_and_its_own(
    root: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, other = Lease(root), Lease(root)
    holder.acquire(lambda _: ())
    monkeypatch.setattr(
        takeover,
        "highest_epoch",
        Once(takeover.highest_epoch, lambda: other.acquire(lambda _: (), force=True)),
    )
    with pytest.raises(RootInUse, match="meanwhile"):
        takeover.unlock(root, expected=holder.claim.epoch)
    other.check()
    holder.release()
    other.release()


def test_the_list_comes_before_older_claims_go(root: Folder) -> None:
    """Keep the claims that decide when a process dies between claiming and listing."""
    made = commit(root)
    for _ in range(3):
        lease = Lease(root)
        lease.acquire(lambda before: counting_ids(root, before), force=True)
        lease.release()
    before = (root / FOLDER).names()

    def die(_: object) -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lease(root).acquire(die, force=True)
    assert set(before) < set((root / FOLDER).names())
    found, _ = newest(root)
    assert found is not None
    assert found.head.id == made.id


@pytest.mark.parametrize("whole", [True, False], ids=["pruned", "a file is lost"])
def test_what_is_read_is_deleted(root: Folder, whole: bool) -> None:
    """Say that a checkpoint was deleted while it was read, and how it is kept."""
    old = commit(root)
    commit(root)
    if whole:
        assert prune(root, Retention(1)).verdict.delete.keys() == {old.id}
    else:
        (root / old.id).delete(old.files[0].name)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00000\.bin is missing") as error:
        read_indexes(root, old, visible_seconds=0)
    assert ("`checknrun pin` keeps one" in str(error.value)) == whole
