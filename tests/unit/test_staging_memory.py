"""Staging memory: pieces never overlap, come free in any order, and waiting ends."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_checknrun.staging_memory import (
    ALIGNMENT,
    MEMORY_FRACTION,
    Ring,
    StagingAborted,
    StagingMemory,
    default_budget,
)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 600), max_size=60),
    size=st.integers(10, 40).map(lambda n: n * ALIGNMENT),
    seed=st.integers(0, 1000),
)
def test_pieces_in_use_never_overlap(sizes: list[int], size: int, seed: int) -> None:
    draw = random.Random(seed)
    ring = Ring(size)
    used: dict[int, int] = {}
    for wanted in sizes:
        while ring._find(max(ALIGNMENT, -(-wanted // ALIGNMENT) * ALIGNMENT)) is None:
            given_back = draw.choice(sorted(used))
            ring.give_back(given_back)
            del used[given_back]
        offset = ring.take(wanted)
        assert offset % ALIGNMENT == 0
        assert offset >= 0
        assert offset + wanted <= size
        for other, length in used.items():
            assert offset + max(wanted, 1) <= other or other + max(length, 1) <= offset
        used[offset] = wanted
    for offset in list(used):
        ring.give_back(offset)
    assert ring.take(size) == 0  # everything is free again


def test_take_waits_for_memory() -> None:
    ring = Ring(4 * ALIGNMENT)
    first, second = ring.take(2 * ALIGNMENT), ring.take(2 * ALIGNMENT)
    assert not ring.waited
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(ring.take(ALIGNMENT)), daemon=True)
    thread.start()
    ring.give_back(second)  # not the first: in a ring it can't be used yet
    thread.join(0.2)
    assert thread.is_alive()
    ring.give_back(first)
    thread.join(10)
    assert found == [0]
    assert ring.waited


def test_abort_ends_waiting() -> None:
    ring = Ring(ALIGNMENT)
    ring.take(1)
    caught: list[Exception] = []

    def take() -> None:
        try:
            ring.take(1)
        except StagingAborted as error:
            caught.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    ring.abort()
    thread.join(10)
    assert len(caught) == 1
    ring.begin()
    assert ring.take(1) == 0
    assert not ring.waited


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_touched_and_given_back(shared: bool) -> None:
    memory = StagingMemory(1 << 20, shared=shared)
    assert memory.bytes.shape == (1 << 20,)
    assert memory.bytes.dtype == torch.uint8
    assert not memory.bytes.any()
    if shared:
        assert memory.descriptor is not None
        other = StagingMemory(1 << 20, descriptor=os.dup(memory.descriptor))
        memory.bytes[5] = 7
        assert other.bytes[5] == 7
        other.close()
    before = len(os.listdir("/proc/self/fd"))
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before - int(shared)


def test_the_default_budget_is_shared_by_a_machines_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = default_budget()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = default_budget()
    assert 0 < shared < alone < MEMORY_FRACTION * os.sysconf("SC_PHYS_PAGES") * 4096
    assert shared == pytest.approx(alone / 4, rel=0.2)
