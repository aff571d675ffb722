"""Keep folders and chains of checkpoints in S3: check visibility and the users' messages."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

import fsspec
import pytest

from tests.examples import some_of
from tests.object_store.conftest import use
from tests.object_store.fault_proxy import Fault, FaultProxy
from tests.object_store.server import SECRET, Server
from tests.unit.chains import Part, apply_in_order, make_shards, restore, same_bits, write
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import RootInUse, StorageFailed, StorageUnreachable
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.counting import counting_ids
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store import retry, s3
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.lease import Claim, Holder, Lease

ROWS = 50


def part(*ids: int) -> list[Part]:
    return [Part((0, 8), list(ids or range(ROWS)), 8)]


def fill(root: Folder) -> Manifest:
    """Commit a full checkpoint and two upon it, of two ranks."""
    first = write(root, ROWS, part(), ranks=2)
    second = write(root, ROWS, part(1, 5, 9), first, ranks=2)
    return write(root, ROWS, part(5, 40), second, ranks=2)


def is_restored(root: Folder, id: str) -> bool:
    places = [Rectangle(0, 20, 0, 8), Rectangle(20, ROWS, 0, 8)]
    found, wanted = make_shards(ROWS, places), make_shards(ROWS, places)
    restore(root, id, found)
    apply_in_order(root, id, wanted)
    pairs = zip(found, wanted, strict=True)
    return all(same_bits(one.weight, other.weight) for one, other in pairs)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Use the smallest parts that S3 accepts."""
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    return 5 << 20


def test_a_chain_s_life(bucket: str) -> None:
    root = Folder(f"{bucket}/team/run")
    assert (root.names(), newest(root)) == ([], (None, []))
    head = fill(root)
    assert [(root / id).names() for id in committed(root)] == [
        ["manifest.json", "rank-00000.bin", "rank-00001.bin"]
    ] * 3
    assert is_restored(root, head.id)
    assert [found.problems for found in verify(root.url)] == [(), (), ()]
    report = compact(root.url)
    assert report is not None
    assert is_restored(root, report.id)
    gone = prune(root, Retention(1)).verdict.delete
    assert len(gone) == 3
    assert root.names() == [report.id]
    assert is_restored(root, report.id)


@pytest.mark.parametrize("size", some_of([0, 1, (5 << 20) - 1, 5 << 20, (23 << 20) + 7], 0, 3, 4))
def test_files_of_many_parts(bucket: str, small_parts: int, size: int) -> None:
    folder, content = Folder(f"{bucket}/files"), random.Random(size).randbytes(size)
    with folder.write("rank-00000.bin") as file:
        for start in range(0, size, 3 << 20):
            file.write(memoryview(content)[start : start + (3 << 20)])
            assert folder.names() == []  # invisible before the end
        assert file.tell() == size
    assert folder.read("rank-00000.bin") == content
    assert folder.read("rank-00000.bin", 3, 5) == content[3:8]
    assert folder.sizes() == {"rank-00000.bin": size}


def uploads(bucket: str) -> list[Any]:
    name = bucket.removeprefix("s3://")
    found = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=name)
    return list(found.get("Uploads") or [])


def test_a_failed_file_leaves_nothing(bucket: str, small_parts: int) -> None:
    folder = Folder(f"{bucket}/files")

    def fail() -> None:
        with folder.write("rank-00000.bin") as file:
            file.write(bytes(4 * small_parts))
            raise ValueError("encoder")

    with pytest.raises(ValueError, match="encoder"):
        fail()
    assert (folder.names(), uploads(bucket)) == ([], [])


def test_of_two_puts_one_wins(bucket: str) -> None:
    folder = Folder(f"{bucket}/run")
    folder.put("claim", b"mine", new=True)
    folder.put("claim", b"mine", new=True)  # repeated for want of an answer
    with pytest.raises(FileExistsError):
        folder.put("claim", b"other", new=True)
    assert folder.read("claim") == b"mine"
    outcomes = []

    def put(content: bytes) -> None:
        try:
            folder.put("raced", content, new=True)
            outcomes.append(content)
        except FileExistsError:
            outcomes.append(b"")

    threads = [threading.Thread(target=put, args=(bytes([n]),)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8
    assert [content for content in outcomes if content] == [folder.read("raced")]


def test_the_second_writer_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Folder(f"{bucket}/run")
    first, second = Lease(root), Lease(root)
    first.acquire(lambda _: ())
    other = Holder("another", 0, "far", "another", 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Holder, "this_process", classmethod(lambda cls: other))
        with pytest.raises(RootInUse):
            second.acquire(lambda _: ())
        first.release()
        second.acquire(lambda _: ())
    claim: Claim = second.claim
    assert claim.epoch == 2
    second.release()


def test_a_missing_bucket(bucket: str) -> None:
    root = Folder("s3://no-such-bucket-of-anybody/run")
    # Never take the root for an empty one.
    for look in (lambda: newest(root), lambda: committed(root), lambda: verify(root.url)):
        with pytest.raises(StorageFailed, match="no such bucket: check its name"):
            look()
    with pytest.raises(OSError, match=r"(?i)bucket"):
        root.put("manifest.json", b"{}")
    with pytest.raises(OSError, match=r"(?i)bucket"), root.write("rank-00000.bin") as file:
        file.write(b"rows")


def test_wrong_credentials_fail_at_once(
    server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = Folder(f"{bucket}/run")
    head = fill(root)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    use(monkeypatch, server.url)
    wrong = Folder(root.url)
    started = time.monotonic()
    for act in (
        wrong.names,
        lambda: wrong.put("x", b""),
        lambda: resolve(wrong, head.id),
        lambda: verify(wrong.url),
    ):
        with pytest.raises(StorageFailed, match=r"permission was refused: .* credentials"):
            act()
    assert time.monotonic() - started < 30  # no retries: another attempt can't help
    assert "not-the-secret" not in caplog.text


def test_credentials_are_nowhere(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="torchrec_checknrun")
    root = Folder(f"{bucket}/run")
    lease = Lease(root)
    lease.acquire(lambda _: ())
    fill(root)
    lease.release()
    store = fsspec.filesystem("s3")
    paths = store.find(bucket)
    assert len(paths) == 10
    for path in paths:
        assert SECRET.encode() not in store.cat_file(path)
    assert SECRET not in caplog.text


@pytest.fixture
def through(
    bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, FaultProxy]:
    """Return the bucket behind the proxy."""
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(retry, "_LONGEST_PAUSE", 0.5)
    use(monkeypatch, proxy.url)
    return bucket, proxy


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        ("500", 15),
        ("lost answer", 5),
        *(
            pytest.param(fault, 3, marks=pytest.mark.slow)
            for fault in ("500", "503", "slow", "cut")
        ),
    ],
)
def test_faults_that_pass(
    through: tuple[str, FaultProxy], small_parts: int, fault: Fault, every: int
) -> None:
    """Fail a fraction of the requests of each kind."""
    bucket, proxy = through
    seen: dict[str, int] = {}

    def choose(method: str, path: str) -> Fault | None:
        if fault == "cut" and method != "GET":
            return None
        seen[method] = seen.get(method, 0) + 1
        return fault if seen[method] % every == 2 else None

    proxy.choose = choose
    root = Folder(f"{bucket}/run")
    lease = Lease(root)
    head = fill(root)
    lease.acquire(lambda before: counting_ids(root, before))
    content = random.Random(1).randbytes(12 << 20)
    with (root / head.id).write("more.bin") as file:
        file.write(content)
    lease.check()
    assert (root / head.id).read("more.bin") == content
    assert is_restored(root, head.id)
    assert [found.problems for found in verify(root.url)] == [(), (), ()]
    lease.release()
    assert proxy.faults > 2
    proxy.choose = lambda method, path: None
    assert uploads(bucket) == []


def test_a_fault_that_lasts(
    through: tuple[str, FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy = through
    root = Folder(f"{bucket}/run")
    head = fill(root)
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "1")
    proxy.choose = lambda method, path: "500" if method in ("PUT", "POST") else None
    with pytest.raises(StorageFailed, match=r"put_object of .*: the storage didn't answer"):
        write(root, ROWS, part(), head)
    proxy.choose = lambda method, path: None
    assert is_restored(root, head.id)
    chain, _ = newest(root)
    assert chain is not None
    assert chain.head.id == head.id


@pytest.mark.parametrize("fault", some_of(["429", "502", "504"], 0, 1))
def test_an_unanswered_read_is_no_damage(
    through: tuple[str, FaultProxy], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """A run that passed its newest checkpoint over would abandon it."""
    bucket, proxy = through
    root = Folder(f"{bucket}/run")
    head = fill(root)
    monkeypatch.setenv("CHECKNRUN_RETRY_SECONDS", "0.1")
    proxy.choose = lambda method, path: fault if f"{head.id}/manifest" in path else None
    with pytest.raises(StorageUnreachable, match=rf"{head.id}/manifest.json: the storage didn't"):
        newest(root, resumes=True)


@pytest.mark.parametrize("when", ["writing", pytest.param("restoring", marks=pytest.mark.slow)])
def test_the_server_dies_and_comes_back(
    server: Server, bucket: str, small_parts: int, when: str
) -> None:
    root = Folder(f"{bucket}/run")
    head = fill(root)

    def restart() -> None:
        time.sleep(1)
        server.start()

    content = random.Random(2).randbytes(16 << 20)
    again = threading.Thread(target=restart)
    if when == "writing":
        with (root / head.id).write("more.bin") as file:
            file.write(content[: 8 << 20])
            server.kill()
            again.start()
            file.write(content[8 << 20 :])
        assert (root / head.id).read("more.bin") == content
    else:
        server.kill()
        again.start()
        assert is_restored(root, head.id)
    again.join()
