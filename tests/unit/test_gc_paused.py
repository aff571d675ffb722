"""Pause the garbage collector within the block only, and not in forks of the process."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from torchrec_checknrun.threads import ReadyThread, gc_paused, pause_gc


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


def test_gc_goes_on_once_the_last_pause_ends() -> None:
    first, second = pause_gc(), pause_gc()
    first()
    first()
    assert not gc.isenabled()
    second()
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


def enabled_in_a_fork() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_fork_collects_though_the_thread_that_pauses_is_not_there() -> None:
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
