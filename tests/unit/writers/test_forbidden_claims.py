"""Tell a claim that a process may not read from a damaged one: it decides, and is sound."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.unit.chains import write
from tests.unit.console import Console
from tests.unit.root.commits import ROWS, part
from tests.unit.root.writers import nothing
from torchrec_checknrun.errors import ClaimDamaged, StorageFailed
from torchrec_checknrun.root.chain import newest
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools import takeover
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.claims import FOLDER, read_claims
from torchrec_checknrun.writers.lease import Lease


def forbid(patch: pytest.MonkeyPatch, *claims: str) -> None:
    """Refuse to read claims (tests may run as root, which may read all)."""
    real = Folder.read

    def read(folder: Folder, name: str, *args: Any) -> bytes:
        if name in claims:
            raise StorageFailed(errno.EACCES, f"reading {folder}/{name}: permission was refused")
        return real(folder, name, *args)

    patch.setattr(Folder, "read", read)


def content(root: Folder) -> dict[str, bytes]:
    """Read all claims."""
    return {name: (root / FOLDER).read(name) for name in (root / FOLDER).names()}


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    """Make a root whose first claim decides nothing any more."""
    root = Folder(tmp_path / "run")
    root.create()
    made = write(root, ROWS, part())
    for committed in (nothing, lambda _: [made.id]):
        lease = Lease(root)
        lease.acquire(committed)
        lease.release()
    return root


def test_nothing_is_repaired_or_restored(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(root)
    latest = max(before)
    with monkeypatch.context() as patch:
        forbid(patch, latest)
        for act in (
            newest,
            takeover.repair,
            takeover.unlock,
            lambda root: Lease(root).acquire(nothing),
        ):
            with pytest.raises(ClaimDamaged, match=f"{latest}: .*permission was refused") as told:
                act(root)
            assert "checknrun repair" not in str(told.value)
        refused = console.run("repair", root, "--yes")
        assert refused.code == 2
        assert "permission was refused" in " ".join(refused.err.split())
        (problems,) = (one.problems for one in verify(root.url) if latest in one.id)
        assert problems
        assert not any("checknrun repair" in text for text in problems)
    assert content(root) == before
    assert newest(root)[0] is not None


def test_one_that_decides_nothing_stays(
    root: Folder, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(root)
    with monkeypatch.context() as patch:
        forbid(patch, min(before))
        assert read_claims(root, every=True).undecided == ()
        assert newest(root)[0] is not None
        takeover.repair(root)
        told = console.run("repair", root)
        assert "nothing to repair" in told.out
        assert min(before) in told.out
    assert content(root) == before


def test_one_of_two_is_damaged(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose neither where a damaged claim comes after one that can't be read."""
    first, second = sorted(content(root))
    (root / FOLDER).put(second, b"torn")
    before = content(root)
    with monkeypatch.context() as patch:
        forbid(patch, first)
        with pytest.raises(ClaimDamaged, match=f"{first}: .*permission was refused"):
            takeover.repair(root)
    assert content(root) == before
