"""Pin a checkpoint at each instant of a pruning that deletes it, and prune at each of a pinning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.chains import write
from tests.unit.interruption import interrupted
from tests.unit.root.commits import ROWS, part, write_full
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention, pin
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.store.local import LocalStore


def pinned(root: Folder, id: str) -> bool:
    """Pin a checkpoint; return whether that was done."""
    try:
        pin(root, id)
    except CheckpointNotFound:
        return False
    return True


def fill(root: Folder) -> list[Manifest]:
    """Commit a full checkpoint, two based on it, and another full one."""
    root.create()
    first = write(root, ROWS, part())
    second = write(root, ROWS, part(5), first)
    return [first, second, write_full(root, write(root, ROWS, part(4), second))]


def pin_in_pruning(root: Folder, at: int) -> bool | None:
    """Pin at a call of a pruning; return whether that was done, None if there is no such call."""
    first, second, last = fill(root)
    told: list[bool] = []
    with interrupted(at, lambda: told.append(pinned(root, second.id))) as reached:
        prune(root, Retention(1))
    resolve(root, last.id)
    if told == [True]:
        assert [m.id for m in resolve(root, second.id).manifests] == [first.id, second.id]
    else:
        assert root.names() == [last.id]
    return told[0] if reached() else None


def prune_in_pin(root: Folder, at: int) -> bool | None:
    """Prune at a call of a pin; return as ``pin_in_pruning``."""
    first, _, last = fill(root)
    with interrupted(at, lambda: prune(root, Retention(1))) as reached:
        kept = pinned(root, first.id)
    if not reached():
        return None
    assert root.names() == ([first.id, last.id] if kept else [last.id])
    return kept


@pytest.mark.parametrize("trial", [pin_in_pruning, prune_in_pin])
def test_a_pin_that_is_told_keeps_its_checkpoint(
    tmp_path: Path, trial: Callable[[Folder, int], bool | None]
) -> None:
    outcomes = {trial(Folder(tmp_path / str(at)), at) for at in range(99)}
    assert outcomes == {True, False, None}  # whoever comes first; and all calls were tried


def test_a_pin_right_before_the_manifest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pin between the last look for pins and the deletion of the manifest, which is put back."""
    root = Folder(tmp_path / "root")
    first, second, last = fill(root)
    content = (root / second.id).read("manifest.json")
    real = LocalStore.delete

    def delete(store: LocalStore, name: str) -> None:
        if name == "manifest.json" and content == (root / second.id).read(name):
            monkeypatch.setattr(LocalStore, "delete", real)
            pin(root, second.id)
        real(store, name)

    monkeypatch.setattr(LocalStore, "delete", delete)
    done = prune(root, Retention(1))
    assert "was pinned meanwhile" in done.problems[0]
    assert (root / second.id).read("manifest.json") == content
    resolve(root, last.id)
    assert [m.id for m in resolve(root, second.id).manifests] == [first.id, second.id]
