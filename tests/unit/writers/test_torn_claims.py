"""Withdraw a claim that could be written only in part: nobody could tell whose it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.root.writers import nothing
from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Claim, Lease

CLAIM = "epoch-00000001.json"


def tear(monkeypatch: pytest.MonkeyPatch, root: Folder, which: int, size: int) -> None:
    """Let the put with this number write as many bytes, to the claim's own name, and fail.

    Other roots' claims may be renewed meanwhile.
    """
    real, count, where = Folder.put, 0, (root / FOLDER).url

    def put(folder: Folder, name: str, data: bytes, **options: Any) -> None:
        nonlocal count
        if (folder.url, name) == (where, CLAIM):
            count += 1
            if count == which:
                real(folder, name, data[:size], **options)
                raise OSError(5, "no more")
        real(folder, name, data, **options)

    monkeypatch.setattr(Folder, "put", put)


@pytest.mark.parametrize("size", [120, 200])
@pytest.mark.parametrize("which", [1, 2])
def test_the_next_attempt_succeeds(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch, which: int, size: int
) -> None:
    first, second = Lease(root), Lease(root)
    leases += [first, second]
    with monkeypatch.context() as patch:
        tear(patch, root, which, size)
        with pytest.raises(OSError, match="no more"):
            first.acquire(nothing)
    assert (root / FOLDER).names() == []
    second.acquire(nothing)
    assert second.claim.epoch == 1


@pytest.mark.parametrize("size", [0, 20])
def test_what_may_be_another_writers_stays(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Leave bytes that all claims begin with."""
    first, second = Lease(root), Lease(root)
    leases += [first, second]
    with monkeypatch.context() as patch:
        tear(patch, root, 1, size)
        with pytest.raises(OSError, match="no more"):
            first.acquire(nothing)
    assert (root / FOLDER).size(CLAIM) == size
    with pytest.raises(RootInUse, match="is damaged and was written less than"):
        second.acquire(nothing)


def test_a_whole_claim_stays_though_its_writing_failed(
    root: Folder, leases: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Lease(root), Lease(root)
    leases += [first, second]
    with monkeypatch.context() as patch:
        tear(patch, root, 1, 1 << 20)
        with pytest.raises(OSError, match="no more"):
            first.acquire(nothing)
    assert (root / FOLDER).names() == [CLAIM]
    second.acquire(nothing)
    assert second.claim.epoch == 1
    assert isinstance(second.claim, Claim)
