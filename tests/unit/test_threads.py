"""Finish threads' work while the interpreter ends; let the caller work where no thread starts."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from torchrec_checknrun.threads import ReadyThread, Threads, at_once


def test_several_things_at_a_time() -> None:
    meet = threading.Barrier(3)
    with Threads(3, "test") as threads:
        assert sorted(f.result() for f in [threads.submit(meet.wait) for _ in range(3)]) == [
            0,
            1,
            2,
        ]


def test_one_thread_keeps_the_order_and_closing_waits() -> None:
    done: list[int] = []
    with Threads(1, "test") as threads:
        for number in range(100):
            threads.submit(partial(done.append, number))
    assert done == list(range(100))
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]


def fail() -> NoReturn:
    raise OSError("no space left, says the test")


def test_errors_come_back() -> None:
    with Threads(1, "test") as threads:
        with pytest.raises(OSError, match="no space left"):
            threads.submit(fail).result()
        assert threads.submit(lambda: 1).result() == 1


def test_closing_can_drop_what_was_not_begun() -> None:
    begun, go, done = threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        go.wait(60)
        done.append(0)

    threads = Threads(1, "test")
    threads.submit(wait)
    threads.submit(lambda: done.append(1))
    begun.wait(60)
    threading.Timer(0.1, go.set).start()
    threads.close(cancel=True)
    assert done == [0]
    threads.close()


class Chunk:
    """A stand-in for memory."""


def test_what_is_done_is_not_kept() -> None:
    chunk = Chunk()
    gone = weakref.ref(chunk)
    with Threads(1, "test") as threads:
        threads.submit(partial(id, chunk)).result()
        del chunk
        threads.submit(lambda: None).result()
        assert gone() is None


def test_without_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Threads(2, "test") as threads:
        assert threads.submit(threading.get_ident).result() == threading.get_ident()
        failed: Future[NoReturn] = threads.submit(fail)
        assert isinstance(failed.exception(), OSError)


SCRIPT = """
import atexit, pathlib, sys
from torchrec_checknrun.threads import ReadyThread, Threads

def last_words():
    with Threads(2, "test") as threads:
        pathlib.Path(sys.argv[1]).write_text(threads.submit(lambda: "written").result())

atexit.register(last_words)
"""


def test_while_the_interpreter_ends(tmp_path: Path) -> None:
    told = tmp_path / "told"
    subprocess.run([sys.executable, "-c", SCRIPT, str(told)], check=True, timeout=60)
    assert told.read_text() == "written"


def test_a_ready_thread_does_one_piece_of_work() -> None:
    done: list[str] = []
    ready = ReadyThread("test-ready")
    thread = ready.give(lambda: done.append(threading.current_thread().name))
    assert thread is not None
    thread.join(60)
    assert done == ["test-ready"]
    assert ready.give(lambda: None) is None


def test_a_ready_thread_without_work_ends() -> None:
    ended = ReadyThread("test-ready")
    ended.end()
    forgotten = ReadyThread("test-ready")
    thread = forgotten._thread
    del forgotten
    thread.join(60)
    assert not [t for t in threading.enumerate() if t.name == "test-ready"]


def test_what_waits_is_done_at_once_in_order() -> None:
    together = threading.Barrier(3, timeout=20)

    def wait(number: int) -> int:
        together.wait()
        return number

    assert at_once([partial(wait, number) for number in range(3)], "test") == [0, 1, 2]
    assert at_once([threading.current_thread], "test") == [threading.current_thread()]
    assert at_once([], "test") == []


def test_the_first_error_comes_once_all_have_ended() -> None:
    began, ended = threading.Event(), threading.Event()

    def fail(text: str) -> NoReturn:
        began.wait(20)
        raise ValueError(text)

    def slow() -> None:
        began.set()
        threading.Event().wait(0.1)
        ended.set()

    acts: list[Callable[[], None]] = [partial(fail, "first"), slow, partial(fail, "second")]
    with pytest.raises(ValueError, match="first"):
        at_once(acts, "test")
    assert ended.is_set()


def test_an_interrupt_waits_for_nothing_that_hangs() -> None:
    hangs, stop = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        stop.wait(60)

    def interrupt() -> NoReturn:
        hangs.wait(20)
        raise KeyboardInterrupt

    acts: list[Callable[[], None]] = [interrupt, hang]
    with pytest.raises(KeyboardInterrupt):
        at_once(acts, "test")
    assert not stop.is_set()
    stop.set()
