"""Pause the garbage collector within the block only, or until a thread takes over."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from torchrec_checknrun.threads import ReadyThread, gc_paused


@pytest.fixture(autouse=True)
def collector() -> None:
    assert gc.isenabled()


def test_gc_is_paused_within_nested_blocks() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_has_none_gets_none() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thread_that_is_given_work_ends_the_pause() -> None:
    ready, seen = ReadyThread("test"), []
    with gc_paused():
        thread = ready.give(lambda: seen.append(gc.isenabled()))
    assert thread is not None
    thread.join()
    assert seen == [True]
    assert gc.isenabled()


def test_an_error_after_a_thread_was_given_work() -> None:
    ready = ReadyThread("test")

    @gc_paused()
    def fail() -> None:
        ready.give(lambda: None)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    ready._thread.join()
    assert gc.isenabled()


def test_a_thread_that_is_gone_takes_nothing_over() -> None:
    ready = ReadyThread("test")
    ready.end()
    with gc_paused():
        assert ready.give(lambda: None) is None
    assert gc.isenabled()


def test_work_given_by_another_thread_goes_on_without_ending_the_pause() -> None:
    ready, seen = ReadyThread("test"), []
    with gc_paused():
        other = threading.Thread(target=lambda: ready.give(lambda: seen.append(gc.isenabled())))
        other.start()
        other.join()
        ready._thread.join()
        assert seen == [False]
    assert gc.isenabled()


def test_work_after_a_pause_changes_nothing() -> None:
    ready = ReadyThread("test")
    with gc_paused():
        pass
    gc.disable()
    try:
        thread = ready.give(lambda: None)
        assert thread is not None
        thread.join()
        assert not gc.isenabled()
    finally:
        gc.enable()


def enabled_in_a_fork() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_fork_collects_though_the_thread_that_was_to_end_the_pause_is_not_there() -> None:
    """Let workers of a data loader collect that are started right after a save."""
    ready, go, inside = ReadyThread("test"), threading.Event(), threading.Event()

    @gc_paused()
    def wait() -> None:
        inside.set()
        go.wait(60)

    with gc_paused():
        assert enabled_in_a_fork()
    waiting = ready.give(wait)
    inside.wait(60)
    assert not gc.isenabled()
    assert enabled_in_a_fork()
    go.set()
    assert waiting is not None
    waiting.join()
    assert gc.isenabled()
    gc.disable()
    try:
        assert not enabled_in_a_fork()
    finally:
        gc.enable()
