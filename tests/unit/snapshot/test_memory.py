"""Test staging memory: pieces never overlap, can be released in any order, and waiting ends."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchrec_checknrun.snapshot import memory as staging_memory
from torchrec_checknrun.snapshot.memory import (
    ALIGNMENT,
    LEAST_DEFAULT,
    MEMORY_FRACTION,
    Ring,
    StagingAborted,
    StagingMemory,
    default_budget,
)


@settings(max_examples=examples(200), deadline=None)
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
            ring.release(given_back)
            del used[given_back]
        offset = ring.take(wanted)
        assert offset % ALIGNMENT == 0
        assert offset >= 0
        assert offset + wanted <= size
        for other, length in used.items():
            assert offset + max(wanted, 1) <= other or other + max(length, 1) <= offset
        used[offset] = wanted
    for offset in list(used):
        ring.release(offset)
    assert ring.take(size) == 0  # everything is free again


def test_take_waits_for_memory() -> None:
    ring = Ring(4 * ALIGNMENT)
    first, second = ring.take(2 * ALIGNMENT), ring.take(2 * ALIGNMENT)
    assert not ring.waited
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(ring.take(ALIGNMENT)), daemon=True)
    thread.start()
    ring.release(second)  # not the first piece: a ring can't reuse this one yet
    thread.join(0.2)
    assert thread.is_alive()
    ring.release(first)
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
    descriptor = memory.descriptor
    own = Path(f"/proc/self/fd/{descriptor}")
    opened = None if descriptor is None else own.stat()
    memory.close()
    if opened is not None and own.exists():  # another test's thread may have the number by now
        assert not os.path.samestat(own.stat(), opened)


def test_the_default_budget_is_shared_by_a_machines_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = default_budget()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = default_budget()
    assert 0 < shared < alone < MEMORY_FRACTION * os.sysconf("SC_PHYS_PAGES") * 4096
    assert shared == pytest.approx(alone / 4, rel=0.2)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a control group of 1 GB, all of it in use, 600 MB of that by files."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(staging_memory, "_CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("999999000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 399999000\nactive_file 100000000\ninactive_file 480000000\n"
        "slab_reclaimable 20000000\nslab 30000000\n"
    )
    return tmp_path


def test_files_that_a_container_has_read_leave_memory_for_the_budget(container: Path) -> None:
    assert default_budget() == int(500_001_000 * MEMORY_FRACTION)


@pytest.mark.parametrize("stat", [None, "", "inactive_file\n", "inactive_file many\n"])
def test_without_those_counts_all_in_use_is_in_use(container: Path, stat: str | None) -> None:
    (container / "memory.current").write_text("400000000\n")
    (container / "memory.stat").unlink()
    if stat is not None:
        (container / "memory.stat").write_text(stat)
    assert default_budget() == int(600_000_000 * MEMORY_FRACTION)


def test_a_container_without_a_limit_has_the_machines_memory(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    assert default_budget() > 600_000_000 * MEMORY_FRACTION


def test_the_default_budget_is_never_ruinous(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container / "memory.current").write_text("1100000000\n")
    (container / "memory.stat").unlink()
    assert default_budget() == LEAST_DEFAULT
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert default_budget() == LEAST_DEFAULT
