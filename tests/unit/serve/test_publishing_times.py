"""Publications are made by the clock, behind training, and one at a time with checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some_of
from tests.unit.serve import test_publishing
from tests.unit.serve.served import Net, differences, quantized
from tests.unit.serve.test_publishing import Roots, manifests, plain, publisher, publishing
from torchrec_checknrun import Follower
from torchrec_checknrun.run import publisher as run_publisher
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")
_roots = test_publishing._roots


@contextmanager
def stuck(monkeypatch: pytest.MonkeyPatch, root: Path) -> Iterator[threading.Event]:
    """Hold writes below a root up, until the block ends or the event is set."""
    go, write = threading.Event(), background.write_rank_file

    def waiting(folder: Folder, *arguments: Any, **more: Any) -> Any:
        if str(folder).startswith(str(root)):
            assert go.wait(60)
        return write(folder, *arguments, **more)

    monkeypatch.setattr(background, "write_rank_file", waiting)
    try:
        yield go
    finally:
        go.set()


def test_a_due_checkpoint_waits_for_no_more_than_the_publication_on_its_way(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = publishing(roots, every_steps=3)
    follower = Follower(roots[1], quantized(Net(), 4))
    job.train(1)
    wanted = quantized(plain(job), 4)
    with stuck(monkeypatch, roots[1]) as go:
        assert job.saver.publish(wait=False) is None
        job.train(2)
        job.train(3)  # a checkpoint is due, and training goes on
        assert job.saver._saver.running is None
        assert not manifests(roots[0])
        go.set()
        running = publisher(job)._running
        assert running is not None
        assert running.known.wait(60)
        job.train(4)
    report = job.saver.wait()
    assert report is not None
    assert report.step == 4
    assert job.saver.published is not None
    assert job.saver.published.step == 1
    follower.poll()
    assert differences(follower, wanted) == []  # of its step, though training went on
    job.saver.close()


def test_a_checkpoint_that_was_put_off_at_the_last_step_is_made_at_the_end(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = publishing(roots, every_steps=2)
    job.train(1)
    with stuck(monkeypatch, roots[1]) as go:
        job.saver.publish(wait=False)
        job.train(2)
        assert not manifests(roots[0])
        go.set()
        job.saver.close()
    assert [manifest.step for manifest in manifests(roots[0])] == [2]


def test_the_last_steps_are_published_where_a_checkpoint_was_put_off(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = publishing(roots, every_steps=2)
    job.train(1)
    with stuck(monkeypatch, roots[1]) as go:
        job.saver.publish(wait=False)
        job.train(2)
        go.set()
        report = job.saver.publish()
    assert report is not None
    assert report.step == 2
    assert [manifest.step for manifest in manifests(roots[0])] == [2]
    job.saver.close()


def test_a_due_publication_waits_while_a_checkpoint_is_on_its_way(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = publishing(roots, publish={"every_seconds": 1e-6})
    with stuck(monkeypatch, roots[0]) as go:
        job.saver.save(wait=False)
        for seed in range(3):
            job.train(seed)
        assert publisher(job)._running is None
        go.set()
        job.saver.wait()
    job.train(4)
    job.saver.wait()
    assert job.saver.published is not None
    assert job.saver.published.step == 4
    job.saver.close()


WAYS = [("thread", "copy_on_write"), ("thread", "encode"), ("process", "copy_on_write")]


@pytest.mark.parametrize(("kind", "staging"), some_of(WAYS, 0, 1))
def test_publications_by_the_clock(
    roots: Roots, caplog: pytest.LogCaptureFixture, kind: str, staging: str
) -> None:
    job = publishing(roots, publish={"every_seconds": 1e-6}, background=kind, staging=staging)
    follower = Follower(roots[1], quantized(Net(), 2))
    with caplog.at_level(logging.INFO):
        for seed in range(4):
            job.train(seed)
            job.saver.wait()
            version = follower.poll()
            assert version is not None
            assert version.step == seed + 1
            assert differences(follower, quantized(plain(job), 2)) == []
    assert caplog.text.count("published: ") == 4
    job.saver.close()


def test_a_restore_while_a_publication_is_on_its_way(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait for the publication, which is of an earlier state; the next one is a base."""
    job = publishing(roots)
    follower = Follower(roots[1], quantized(Net(), 4))
    job.train(1)
    job.save()
    first = quantized(plain(job), 4)
    test_publishing.publish(job)
    job.train(2)
    second = quantized(plain(job), 4)
    with stuck(monkeypatch, roots[1]) as go:
        assert job.saver.publish(wait=False) is None
        await_save = run_publisher.await_save

        def waits(*arguments: Any) -> None:
            go.set()
            await_save(*arguments)

        monkeypatch.setattr(run_publisher, "await_save", waits)
        assert not go.is_set()
        job.saver.restore()
        assert go.is_set()
    follower.poll()
    assert differences(follower, second) == []
    assert test_publishing.publish(job).kind == "full"
    version = follower.poll()
    assert version is not None
    assert (version.step, version.whole) == (1, True)
    assert differences(follower, first) == []
    job.saver.close()
