"""Publish to S3 and follow from there: whatever the store does, a follower has a whole version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.object_store.conftest import use
from tests.object_store.fault_proxy import Fault, FaultProxy
from tests.unit import conftest
from tests.unit.serve.served import Job, Net, differences, quantized
from tests.unit.serve.test_publishing import plain, publish, publisher
from torchrec_checknrun import Follower, Publish, Version
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.store.folder import Folder

one_rank = conftest.one_rank
pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_run_that_publishes_to_s3(
    bucket: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow a run over a restore and a pruning; while the store fails, serving goes on."""
    use(monkeypatch, proxy.url)
    root = f"{bucket}/serve"
    job = Job(tmp_path, publish=Publish(root, every_seconds=1e6, bits=32, keep=1))
    follower = Follower(root, quantized(Net(), 4), timeout_seconds=2.0)
    late = Follower(root, quantized(Net(), 4))
    model = plain(job)

    def follow(follower: Follower) -> Version:
        version = follower.poll()
        assert version is not None
        assert differences(follower, quantized(model, 4)) == []
        return version

    def train_and_publish(seed: int) -> str:
        nonlocal model
        job.train(seed)
        model = plain(job)
        return publish(job).kind

    assert train_and_publish(0) == "full"
    assert follow(follower).whole
    follow(late)
    job.save()
    assert train_and_publish(1) == "differential"
    assert not follow(follower).whole
    before = model

    def gone(method: str, path: str) -> Fault | None:
        return "503"

    assert train_and_publish(2) == "differential"
    model, newest = before, model
    proxy.choose = gone
    version = follow(follower)
    assert version.error is not None
    assert version.step == 2
    proxy.choose = lambda method, path: None
    model = newest
    version = follow(follower)
    assert (version.step, version.error) == (3, None)

    publisher(job)._writer.wait_for_pruning()  # it may still wait for the store that failed
    job.saver.restore()  # goes back to the first step, which no mark tells of
    assert train_and_publish(3) == "full"
    publisher(job)._writer.wait_for_pruning()
    assert len(committed(Folder(root))) == 1
    for each in (follower, late):  # what the late one serves, and builds on, is gone
        version = follow(each)
        assert (version.step, version.whole, version.error) == (2, True, None)
    job.saver.close()
