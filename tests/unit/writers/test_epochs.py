"""Survive claims with high numbers that anybody may have written."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from torchrec_checknrun.errors import CheckNRunError, StorageFailed
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Lease, latest_claim


def claim(root: Folder) -> int:
    lease = Lease(root)
    lease.acquire(lambda _: ())
    epoch = lease.claim.epoch
    lease.release()
    return epoch


def junk(root: Folder, name: str) -> None:
    """Write a damaged claim, a day old."""
    (root / FOLDER).create()
    (root / FOLDER).put(name, b"junk")
    yesterday = time.time() - 86400
    os.utime(Path(root.url, FOLDER, name), (yesterday, yesterday))


@pytest.mark.parametrize("epoch", [99_999_999, 100_000_000, 10**17])
def test_the_next_number_has_more_digits(tmp_path: Path, epoch: int) -> None:
    root = Folder(tmp_path)
    junk(root, f"epoch-{epoch}.json")
    assert claim(root) == epoch + 1
    assert claim(root) == epoch + 2
    latest = latest_claim(root)
    assert latest is not None
    assert latest.epoch == epoch + 2


def test_after_the_last_number_it_says_so(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    junk(root, f"epoch-{'9' * 18}.json")
    for _ in range(2):
        with pytest.raises(CheckNRunError, match=r"epoch-9{18}\.json.*delete it"):
            claim(root)
    assert (root / FOLDER).names() == [f"epoch-{'9' * 18}.json"]


def test_numbers_that_no_claim_would_have_are_passed_over(tmp_path: Path) -> None:
    root = Folder(tmp_path)
    junk(root, "epoch-0000000009.json")
    assert claim(root) == 1


def test_who_may_not_delete_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim a root without the right to delete, as buckets with locked objects give none."""

    def refuse(folder: Folder, name: str) -> None:
        raise StorageFailed(errno.EACCES, f"deleting {folder}/{name}: permission was refused")

    monkeypatch.setattr(Folder, "delete", refuse)
    root = Folder(tmp_path)
    assert [claim(root) for _ in range(4)] == [1, 2, 3, 4]
    latest = latest_claim(root)
    assert latest is not None
    assert latest.epoch == 4
