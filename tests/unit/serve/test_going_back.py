"""A follower goes back to an older version only where the newer one is gone, and says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.unit.serve.served import Job, Net, differences, newest, quantized, restored, served
from torchrec_checknrun import Follower
from torchrec_checknrun.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    job = Job(tmp_path / "run")
    for seed in range(3):
        job.train(seed)
        job.save()
    job.saver.close()
    return tmp_path / "run"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_listing_as_of_an_earlier_call(
    root: Path, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is there, and some stores' listings lack it for a while."""
    follower = Follower(root, quantized(Net(), 8), copies=copies)
    last = newest(root).name
    assert served(follower).checkpoint_id == last
    wanted, names = quantized(restored(root), 8), LocalStore.list
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", lambda self: [n for n in names(self) if n != last])
        for _ in range(2):
            version = served(follower)
            assert (version.checkpoint_id, version.error) == (last, None)
            assert differences(follower, wanted) == []
    assert served(follower).checkpoint_id == last


def test_the_newest_was_deleted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As somebody does who doesn't want to serve it."""
    follower = Follower(root, quantized(Net(), 8))
    last = served(follower)
    shutil.rmtree(root / last.checkpoint_id)
    with caplog.at_level(logging.WARNING):
        version = served(follower)
    assert (version.step, version.error) == (last.step - 1, None)
    assert differences(follower, quantized(restored(root), 8)) == []
    assert f"{version.checkpoint_id} is served in place of {last.checkpoint_id}" in caplog.text
