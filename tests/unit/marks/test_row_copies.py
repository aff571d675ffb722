"""Rows are copied as of their cut, each once, whoever comes first and whatever fails meanwhile."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import ALL, examples
from tests.unit.marks.row_copy_cases import (
    Frozen,
    Kernel,
    Shard,
    frozen_bits,
    frozen_bytes,
    one_shard,
    overflow,
    some_ids,
    tensors,
)
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.row_copies import (
    PAGE_BYTES,
    KernelCopies,
    RowCopies,
    can_copy_on_write,
)
from torchrec_checknrun.native import has_extension

pytestmark = pytest.mark.skipif(
    not has_extension(), reason="the compiled extension was not built: there was no C++ compiler"
)
SLACK = 10.0
"""Seconds that a busy machine may take."""


def frozen_somehow(chance: random.Random, size: int) -> tuple[Frozen | None, set[int] | None]:
    """Draw a set of rows, in none to three layers of bytes or bits."""
    if chance.random() < 0.15:
        return None, None
    frozen: Frozen = []
    rows: set[int] = set()
    for _ in range(chance.randint(0, 3)):
        some = set(chance.sample(range(size), chance.randint(0, size)))
        rows |= some
        bits = chance.choice([1, 2, 4, 6, 255])
        packed = chance.random() < 0.5
        noise = chance.choice([0, 255])
        frozen += frozen_bits(some, size) if packed else frozen_bytes(some, size, bits, noise)
    return frozen, rows


def go_through(chance: random.Random, shards: list[Shard], kernel: Kernel, unseen: int) -> None:
    """Train, write, sample and stage in any order, until all rows are staged."""
    chunks = []
    for shard in shards:
        span = chance.randint(1, shard.size + 1)
        chunks += [(shard, at, at + span) for at in range(0, shard.size, span)]
    chance.shuffle(chunks)
    while chunks:
        what = chance.choice(["update", "update", "write", "sample", "stage", "stage"])
        shard = chance.choice(shards)
        if what == "update":
            ids = [some_ids(chance, shards[i].size, 40) for i in kernel.feature_to_shard]
            kernel.update(ids, chance.choice([torch.int64, torch.int32]))
        elif what == "write":
            place = chance.choice([i for i in range(len(shards)) if i != unseen])
            written = some_ids(chance, shards[place].size, 10)
            kernel.write(place, written, chance.choice([torch.int64, torch.int32, torch.int16]))
        elif what == "sample":
            left = sorted(shard.left)
            shard.sample(sorted(chance.sample(left, chance.randint(0, len(left)))))
        else:
            shard, start, stop = chunks.pop()
            shard.stage(start, stop, chance.choice([0, 1000]))
    for shard in shards:
        assert not shard.left
        assert shard.copies.native.staged() == len(shard.rows)
        assert shard.copies.native.held() == 0


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 10**9).map(random.Random))
def test_any_order(chance: random.Random) -> None:
    memory = overflow(64)
    copies = RowCopies(memory, SLACK)
    sizes = [chance.choice([1, 2, 7, 8, 9, 60, 515, 1100]) for _ in range(chance.randint(1, 3))]
    generation = chance.randint(1, 127)
    shards = []
    for size in sizes:
        frozen, rows = frozen_somehow(chance, size)
        # What former cuts have left, of any generation but this one.
        former = [s for s in range(256) if s // 2 != generation]
        states = torch.tensor(chance.choices(former, k=size), dtype=torch.uint8)
        shards.append(Shard(copies, tensors(size), frozen, rows, generation, states))
    features = [chance.randrange(len(sizes)) for _ in range(chance.randint(1, 4))]
    kernel = Kernel(copies, shards, features)
    go_through(chance, shards, kernel, unseen=-1)
    copies.complete()
    assert copies.failure is None
    del kernel, shards
    copies.release()
    assert memory.native.free() == memory.native.total()


def test_a_shard_of_the_kernel_that_is_not_copied_on_write() -> None:
    chance = random.Random(3)
    copies = RowCopies(overflow(8), SLACK)
    shards = [Shard(copies, tensors(40, i), None, None) for i in range(3)]
    kernel = Kernel(copies, shards, [2, 1, 0, 2], unprotected={1})
    go_through(chance, shards[::2], Kernel(copies, shards[::2], [1, 0, 1]), unseen=-1)
    kernel.update([[1], [2, 3], [4], [-1]])
    kernel.copies.before_write(1, torch.tensor([3]))
    kernel.copies.before_write(7, torch.tensor([3]))
    assert shards[1].copies.native.protected_rows() == 0


def test_more_cuts_than_generations() -> None:
    """Let a shard's states serve many cuts, cleared before a generation comes again."""
    states, table = torch.zeros(50, dtype=torch.uint8), tensors(50)
    memory = overflow(2)
    for cut in range(300 if ALL else 140):
        generation = cut % 127 + 1
        if generation == 1:
            states.zero_()
        chance, copies = random.Random(cut), RowCopies(memory, SLACK)
        frozen, rows = frozen_somehow(chance, 50)
        shard = Shard(copies, table, frozen, rows, generation, states)
        kernel = Kernel(copies, [shard], [0, 0])
        if cut % 5 == 4:  # given up with rows in overflow memory
            kernel.update([[1, 2], [3]])
            copies.fail(SaveFailed("says the test"))
        else:
            go_through(chance, [shard], kernel, unseen=-1)


def test_no_rows() -> None:
    copies = RowCopies(overflow(1), SLACK)
    empty = Shard(copies, tensors(0), None, None)
    other = Shard(copies, tensors(9), [], set())
    kernel = Kernel(copies, [empty, other], [0, 1])
    kernel.update([[0, 5, -1], [0, 5, -1, 12]])
    kernel.update([[], []])
    kernel.write(0, [0])
    for shard in (empty, other):
        shard.stage(0, 99)
        shard.sample([])
        assert shard.copies.native.staged() == shard.copies.native.protected_rows() == 0


def test_a_row_is_staged_once() -> None:
    copies = RowCopies(overflow(1), SLACK)
    shard, kernel = one_shard(copies, 20, {1, 2, 3, 15})
    kernel.update([[2]])
    shard.stage(0, 10)
    for rows in ([1], [2], [1, 2, 3]):
        with pytest.raises(RuntimeError, match=r"staged twice|leaves out rows|twice"):
            shard.stage_rows(rows)
    with pytest.raises(RuntimeError, match="twice"):
        shard.sample([2])
    with pytest.raises(RuntimeError, match="twice"):
        shard.stage_rows([15, 15])


def test_a_chunk_holds_all_rows_of_its_range() -> None:
    copies = RowCopies(overflow(1), SLACK)
    shard, kernel = one_shard(copies, 20)
    kernel.update([[4, 5, 6]])
    with pytest.raises(RuntimeError, match="leaves out rows"):
        shard.stage_rows([4, 6])


@pytest.mark.parametrize("rows", [[7], [-1], [20], [1, 25]])
def test_a_row_that_is_not_in_the_set(rows: list[int]) -> None:
    copies = RowCopies(overflow(1), SLACK)
    shard, kernel = one_shard(copies, 20, {1, 2})
    kernel.update([[0, 1, 2, 7]])
    with pytest.raises((RuntimeError, IndexError)):
        shard.copies.stage(torch.tensor(rows), 0, torch.zeros(9999, dtype=torch.uint8), [0, 512])


def test_memory_that_is_too_small_for_the_copies() -> None:
    copies = RowCopies(overflow(1), SLACK)
    shard, _ = one_shard(copies, 20)
    with pytest.raises(IndexError):
        shard.copies.stage(torch.arange(20), 0, torch.zeros(300, dtype=torch.uint8), [0, 192])
    assert shard.copies.native.staged() == 0
    shard.stage(0, 20)


class TestWhatCanBeCopiedOnWrite:
    def test_ordinary_rows(self) -> None:
        assert can_copy_on_write(tensors(7))
        assert can_copy_on_write([torch.zeros(0, 8)])

    def test_a_row_as_large_as_a_page(self) -> None:
        fits = (PAGE_BYTES - 64) // 4
        assert can_copy_on_write([torch.zeros(2, fits)])
        assert not can_copy_on_write([torch.zeros(2, fits), torch.zeros(2)])
        copies = RowCopies(overflow(1), SLACK)
        shard, kernel = one_shard(copies, 2, width=fits)
        kernel.update([[1]])
        shard.stage(0, 2)

    def test_rows_not_in_one_piece(self) -> None:
        assert not can_copy_on_write([torch.zeros(4, 6)[:, ::2]])
        assert not can_copy_on_write([torch.zeros(())])


def test_released_by_another_thread_while_counted() -> None:
    """Count on, though the background lets go of the shards in the middle (found by CI)."""
    copies = RowCopies(overflow(2), SLACK)

    class Counted(KernelCopies):
        released = False

        def protected_rows(self) -> int:
            if not self.released:
                self.released = True
                copies.release()
            return 7

        def longest_wait_ns(self) -> int:
            return 2_000_000_000

    Counted(copies, {})  # adds itself
    assert copies.count().rows == 7
    assert copies.count().row_seconds == 2
