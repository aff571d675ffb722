"""Check that failures never show: damaged, missing and half-written checkpoints, storage that is
gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serve.served import (
    Job,
    Net,
    differences,
    newest,
    quantized,
    restored,
    served,
)
from torchrec_checknrun import Follower, Full, OneShot, Retention, Version
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.serve.content import Content
from torchrec_checknrun.serve.copies import TwoCopies
from torchrec_checknrun.serve.load import Load
from torchrec_checknrun.store import coalescing
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "run")
    for seed in range(2):
        job.train(seed)
        job.save()
    return job


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def follower(root: Path, job: Job) -> Follower:
    follower = Follower(root, quantized(Net(), 8))
    assert follower.poll() is not None
    return follower


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_damaged_byte_changes_nothing(root: Path, job: Job, follower: Follower) -> None:
    wanted, before = quantized(restored(root), 8), follower.version
    assert before is not None
    job.train(5)
    job.save()
    file = newest(root) / "rank-00000.bin"
    size = file.stat().st_size
    for at in [*range(0, size, size // 40), size - 1]:
        flip(file, at)
        version = served(follower)
        if version.checkpoint_id != before.checkpoint_id:
            assert at >= size - 40  # a footer is not needed for reading
            break
        assert version.error is not None
        assert version.lag_steps == 1
        assert differences(follower, wanted) == []
        flip(file, at)
    else:
        assert served(follower).error is None
    assert differences(follower, quantized(restored(root), 8)) == []


def test_a_damaged_chain_is_left_by_the_next_full_checkpoint(
    root: Path, job: Job, follower: Follower
) -> None:
    job.train(5)
    job.save()
    damaged = newest(root)
    flip(damaged / "rank-00000.bin", -50)  # the index, which every reader needs
    assert served(follower).error is not None
    job.train(6)
    job.save()  # builds on the damaged one
    version = served(follower)
    assert version.step == 2
    assert version.error is not None
    assert damaged.name in version.error
    shutil.rmtree(damaged)
    job.saver.close()
    again = Job(root)
    again.saver.restore()  # the newest whole one
    again.train(7)
    again.save()
    version = served(follower)
    assert version.sequence == 5
    assert differences(follower, quantized(restored(root), 8)) == []
    again.saver.close()


def test_files_without_a_manifest(root: Path, job: Job, follower: Follower) -> None:
    job.train(5)
    job.save()
    manifest = newest(root) / MANIFEST_NAME
    content = manifest.read_bytes()
    manifest.unlink()
    version = served(follower)
    assert (version.step, version.error) == (2, None)
    manifest.write_bytes(content)
    assert served(follower).step == 3


def test_a_quiet_root_is_only_listed(
    root: Path, job: Job, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(follower)

    def refuse(self: Folder, name: str, *_: Any) -> Any:
        raise AssertionError(f"{self}/{name} is read")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", refuse)
        assert served(follower).error is None
        (root / "seq-000003_step-00000003_00000000").mkdir()  # begun, and not committed
    served(follower)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", refuse)
        assert served(follower).error is None
    job.train(5)
    job.save()
    assert served(follower).step == 3


def test_storage_that_is_gone(
    root: Path, job: Job, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = quantized(restored(root), 8)
    job.train(5)
    job.save()

    def gone(self: Folder, *_: Any) -> Any:
        raise StorageFailed(5, f"listing {self}: gone")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "names", gone)
        version = served(follower)
        assert version.error is not None
        assert "gone" in version.error
        assert differences(follower, wanted) == []
        lag = version.lag_seconds
        assert served(follower).lag_seconds > lag
        with pytest.raises(StorageFailed):
            Follower(root, quantized(Net(), 8)).poll()
    elsewhere = root.rename(root.with_name("moved"))
    version = served(follower)
    assert version.error is not None
    assert "no checkpoint any more" in version.error
    elsewhere.rename(root)
    version = served(follower)
    assert (version.step, version.error) == (3, None)
    assert differences(follower, quantized(restored(root), 8)) == []


def test_checkpoints_deleted_while_they_are_read(
    root: Path, job: Job, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain that is being read is pruned: the newest full checkpoint is read at once."""
    job.train(5)
    job.save()
    job.saver.close()
    monkeypatch.setattr(coalescing, "RUN_BYTES", 0)  # else all is read by then
    read = Content.read
    left = [3]

    def then_delete(self: Content, chunk: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            again = Job(root, policy=Full())
            again.saver.restore()
            again.train(6)
            again.save()
            again.saver.close()
            prune(Folder(root), Retention(keep=1))
        return read(self, chunk)

    monkeypatch.setattr(Content, "read", then_delete)
    version = served(follower)
    assert left[0] < 0
    assert (version.step, version.error, version.whole) == (4, None, True)
    assert differences(follower, quantized(restored(root), 8)) == []


def test_killed_while_rows_are_written(root: Path, job: Job, follower: Follower) -> None:
    job.train(5)
    job.save()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for puts in (1, 2, 4):
        child = os.fork()
        if not child:
            put, left = Load._put, [puts]

            def count(*args: Any, put: Any = put, left: list[int] = left) -> None:
                put(*args)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Load, "_put", count)
                follower.poll()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert {path: path.read_bytes() for path in before} == before
    again = Follower(root, quantized(Net(), 8))
    assert served(again).step == 3
    assert differences(again, quantized(restored(root), 8)) == []


def test_an_attempt_that_fails_half_way_is_undone(
    root: Path, job: Job, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that nobody reads is brought back before the next version is written to it."""
    wanted = quantized(restored(root), 8)
    job.train(5)
    job.save()
    put = Load._put
    calls = []

    def fail(*args: Any) -> None:
        put(*args)
        calls.append(args)
        if len(calls) == 2:
            raise StorageFailed(5, "gone in the middle")

    monkeypatch.setattr(Load, "_put", fail)
    assert served(follower).error is not None
    assert differences(follower, wanted) == []
    shutil.rmtree(newest(root))  # the rows that were written are of no checkpoint any more
    monkeypatch.setattr(Load, "_put", put)
    job.saver.close()
    again = Job(root)
    again.saver.restore()
    again.train(6)
    again.save()
    assert served(follower).error is None
    for _ in range(2):
        assert differences(follower, quantized(restored(root), 8)) == []
        again.train(7)
        again.save()
        assert served(follower).error is None
    again.saver.close()


def test_clocks_apart(root: Path, job: Job, follower: Follower) -> None:
    for seed, shift in ((5, -1e6), (6, 1e6), (7, 0.0)):
        job.train(seed)
        job.save()
        manifest = newest(root) / MANIFEST_NAME
        now = manifest.stat().st_mtime
        os.utime(manifest, (now + shift, now + shift))
        version = served(follower)
        assert version.error is None
        assert version.lag_steps == 0
        assert 0 <= version.lag_seconds < 60
        assert differences(follower, quantized(restored(root), 8)) == []


def test_a_pruned_chain_leads_to_the_newest(root: Path, job: Job) -> None:
    follower = Follower(root, quantized(Net(), 8))
    served(follower)
    job.saver.close()
    again = Job(root, policy=Full())
    again.saver.restore()
    again.train(6)
    again.save()
    again.saver.close()
    prune(Folder(root), Retention(keep=1))
    assert len(list(root.glob("seq-*"))) == 1
    version = served(follower)
    assert (version.whole, version.error) == (True, None)
    assert differences(follower, quantized(restored(root), 8)) == []


def test_a_read_only_root(root: Path, job: Job) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(root.rglob("*"))
    follower = Follower(root, quantized(Net(), 8))
    assert served(follower).error is None
    assert sorted(root.rglob("*")) == before
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)


def test_the_thread_tells_each_version(root: Path, job: Job) -> None:
    told: list[Version] = []
    came = threading.Event()

    def on_version(version: Version) -> None:
        told.append(version)
        came.set()

    with Follower(
        root, quantized(Net(), 8), interval_seconds=0.01, on_version=on_version
    ) as follower:
        assert came.wait(60)
        came.clear()
        job.train(5)
        job.save()
        assert came.wait(60)
    assert [version.step for version in told] == [2, 3]
    assert follower.version is not None
    with follower.read() as (_, version):
        assert version is not None
        assert version.step == 3
    assert follower._thread is None


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities on this system")
def test_the_thread_comes_after_predictions_of_a_process_that_is_nice_itself(
    root: Path, job: Job
) -> None:
    """The thread's priority is 10 below its process's, and storage is read at that, too."""
    seen: dict[str, int] = {}

    def note(name: str) -> None:
        seen[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    read = Folder.read

    def read_noted(self: Folder, *args: Any, **more: Any) -> Any:
        if str(root / "seq-") in self.url:  # what renews the claims of trainers reads, too
            note("read")
        return read(self, *args, **more)

    came = threading.Event()

    def on_version(version: Version) -> None:
        note("told")
        came.set()

    def serve() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)  # of this thread alone
        with Follower(root, quantized(Net(), 8), interval_seconds=0.01, on_version=on_version):
            assert came.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "read", read_noted)
        serving = threading.Thread(target=serve)
        serving.start()
        serving.join(60)
    assert seen == {"read": 15, "told": 15}


def test_a_run_that_deletes_as_it_is_followed(root: Path) -> None:
    """Retention deletes what followers are about to read: they come to the newest all the same."""
    job = Job(root, policy=OneShot(), retention=Retention(keep=1))
    told: list[Version] = []
    with Follower(
        root, quantized(Net(), 8), interval_seconds=0.001, on_version=told.append
    ) as follower:
        for seed in range(12):
            job.train(seed)
            job.save()
    job.saver.close()
    assert served(follower).step == 12
    assert follower.error is None
    assert [v.sequence for v in told] == sorted({v.sequence for v in told})
    assert differences(follower, quantized(restored(root), 8)) == []


def test_nothing_was_published(tmp_path: Path) -> None:
    net = Net()
    follower = Follower(tmp_path / "none", net)
    assert follower.poll() is None
    assert follower.version is None
    with follower.read() as (model, version):
        assert version is None
        assert torch.equal(model.get_parameter("over.weight"), net.over.weight)


def test_a_version_that_is_shown_tells_of_no_earlier_error(
    root: Path, job: Job, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.train(0)
    job.save()
    served(follower)
    elsewhere = root.rename(root.with_name("elsewhere"))
    assert follower.look()
    elsewhere.rename(root)
    shown: list[object] = []
    show: Any = TwoCopies.show

    def show_and_ask(*args: object) -> None:
        show(*args)
        version = follower.version
        assert version is not None
        shown.append((version.step, version.error))

    monkeypatch.setattr(TwoCopies, "show", show_and_ask)
    job.train(1)
    job.save()
    served(follower)
    assert shown == [(4, None)]
