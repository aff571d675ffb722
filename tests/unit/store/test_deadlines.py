"""Bound every wait for the storage; undo abandoned calls that return late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count

import pytest

from tests.crash.hanging import CALLS, HangingStore
from torchrec_checknrun.errors import StorageUnreachable
from torchrec_checknrun.store import deadlines
from torchrec_checknrun.store.deadlines import Patience, given_up, longest_silence
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.threads import Threads

TIMEOUT = 1.0
_numbers = count()
"""Numbers of roots: an abandoned operation of an earlier test may still return."""


@pytest.fixture(autouse=True)
def store() -> Iterator[type[HangingStore]]:
    HangingStore.released.clear()
    yield HangingStore
    HangingStore.released.set()
    HangingStore.hangs.clear()
    HangingStore.store.clear()


def put(folder: Folder) -> None:
    folder.put("b.json", b"x")


def write(folder: Folder) -> None:
    with folder.write("a.bin") as file:
        file.write(b"x")


OPERATIONS: dict[str, tuple[Callable[[Folder], object], set[str]]] = {
    "names": (Folder.names, {"ls"}),
    "sizes": (Folder.sizes, {"ls"}),
    "size": (lambda folder: folder.size("a.json"), {"info"}),
    "read": (lambda folder: folder.read("a.json"), {"cat_file"}),
    "read_into": (
        lambda folder: folder.read_into(memoryview(bytearray(1)), "a.json", 0),
        {"cat_file"},
    ),
    "create": (Folder.create, {"makedirs"}),
    "put": (put, {"pipe_file"}),
    "read back": (put, {"cat_file"}),
    "delete": (lambda folder: folder.delete("a.json"), {"rm_file"}),
    "open": (write, {"open"}),
    "close": (write, {"close"}),
    "size found": (write, {"info"}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_ends(store: type[HangingStore], name: str) -> None:
    act, hangs = OPERATIONS[name]
    folder = Folder(f"hanging://run/{next(_numbers)}", TIMEOUT)
    folder.put("a.json", b"x")
    store.hangs |= hangs
    started = time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"hanging://run.*nothing was heard.*0\.8 s"):
        act(folder)
    assert time.monotonic() - started < 10  # on a busy machine


def test_several_operations_wait_shorter_until_one_is_answered(store: type[HangingStore]) -> None:
    folder = Folder(f"hanging://run/{next(_numbers)}", 20.0)
    patience = (folder / "other").patience  # one store, one patience
    assert patience.seconds == 16
    folder.patience.timeout_seconds = TIMEOUT
    store.hangs |= set(CALLS)
    with pytest.raises(StorageUnreachable):
        folder.names()
    folder.patience.timeout_seconds = 20.0
    assert patience.seconds == folder.patience.apart().seconds == 2
    store.released.set()
    folder.names()
    assert patience.seconds == 16


def test_a_put_that_was_given_up_is_taken_back(
    store: type[HangingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit nothing by a put whose save has failed, even an hour later."""
    deleted: list[str] = []
    rm_file = store.rm_file

    def record(self: HangingStore, path: str) -> None:
        rm_file(self, path)
        deleted.append(path)

    monkeypatch.setattr(store, "rm_file", record)
    folder = Folder(f"hanging://run/{next(_numbers)}", TIMEOUT)
    store.hangs.add("manifest")
    with pytest.raises(StorageUnreachable, match=r"manifest\.json"):
        folder.put("manifest.json", b"{}", new=True)
    store.released.set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not deleted:
        time.sleep(0.01)
    assert folder.names() == []


def test_on_a_disk_it_is_not_even_made(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrec_checknrun.store import new_file

    go, went = threading.Event(), threading.Event()
    fsync = new_file.os.fsync

    def hang(descriptor: int) -> None:
        go.wait(60)
        fsync(descriptor)

    folder = Folder(str(tmp_path), TIMEOUT)
    with monkeypatch.context() as patch:
        patch.setattr(new_file.os, "fsync", hang)
        with pytest.raises(StorageUnreachable):
            folder.put("manifest.json", b"{}", new=True)
    folder.patience.call(went.set, "waiting")
    go.set()
    deadline = time.monotonic() + 60
    while folder.names() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert folder.names() == []


def test_a_call_knows_that_it_was_given_up() -> None:
    patience, go, knew = Patience(0.1), threading.Event(), Future[bool]()

    def act() -> None:
        go.wait(60)
        knew.set_result(given_up())

    with pytest.raises(StorageUnreachable, match=r"asking x.*timeout_seconds=0\.1"):
        patience.call(act, "asking x")
    assert not given_up()
    go.set()
    assert knew.result(60)


def test_progress_extends_the_deadline() -> None:
    """Set no time limit to a chunk whose bytes make progress."""
    patience, steps = Patience(0.5), iter(range(100))

    def slowly() -> str:
        time.sleep(1.5)
        return "done"

    with Threads(1, "test") as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_checknrun.store.deadlines._LOOK_SECONDS", 0.1)
        future = threads.submit(slowly)
        assert patience.result(future, "writing", lambda: next(steps)) == "done"
        with pytest.raises(StorageUnreachable, match="writing x"):
            patience.result(threads.submit(slowly), "writing x")


def test_errors_and_results_come_back() -> None:
    patience = Patience(60)
    assert patience.call(lambda: patience.call(lambda: 5, "inner"), "outer") == 5
    with pytest.raises(ValueError, match="says the test"):
        patience.call(lambda: int("says the test"), "x")
    with pytest.raises(TimeoutError, match="its own"):
        patience.call(_own_timeout, "x")
    assert _comes_to_rest()


def _comes_to_rest() -> bool:
    """Tell whether no call stays in flight; the leases of other tests' writers ask now and then."""
    deadline = time.monotonic() + 60
    while longest_silence() != (0.0, ""):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _own_timeout() -> None:
    raise TimeoutError("its own")


def test_the_longest_silence_is_named() -> None:
    patience = Patience(60)
    go = threading.Event()
    waits = threading.Thread(target=patience.call, args=(lambda: go.wait(60), "listing x"))
    waits.start()
    try:
        deadline = time.monotonic() + 60
        while longest_silence()[0] < 0.2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert longest_silence()[1] == "listing x"
    finally:
        go.set()
        waits.join()


def test_a_call_without_a_thread_is_seen_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that ends starts no thread (Python 3.12), and gives up what is silent."""

    def refuse() -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(deadlines, "_Worker", refuse)
    monkeypatch.setattr(deadlines, "_idle", [])
    assert Patience(TIMEOUT).call(lambda: longest_silence()[1], "asking") == "asking"
    assert _comes_to_rest()
