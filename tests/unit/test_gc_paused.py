"""Pause the garbage collector within the block only."""

from __future__ import annotations

import gc

import pytest

from torchrec_checknrun.threads import gc_paused


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
