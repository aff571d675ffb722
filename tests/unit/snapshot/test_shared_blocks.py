"""Digest blocks that ranks of another mesh may hold as well.

The digests are computed from staged blocks, not in the stall, however a rank cuts its blocks.
"""

from __future__ import annotations

import threading

import pytest
import torch

from torchrec_checknrun.boxes import Box
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.format.chunk import EncodedChunk
from torchrec_checknrun.format.manifest import Header
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.save.plan import summarize
from torchrec_checknrun.snapshot.items import Items
from torchrec_checknrun.snapshot.memory import Ring, StagingMemory
from torchrec_checknrun.snapshot.snapshot import Snapshot
from torchrec_checknrun.snapshot.staging import Staging

SHAPE = (37, 6, 5)


def snapshot(values: torch.Tensor) -> Snapshot:
    def block(name: str, elsewhere: bool) -> Block:
        tensor, box = values.clone(), Box.whole(values.shape)
        return Block(("model", name), tuple(values.shape), box, tensor, elsewhere=elsewhere)

    found = Snapshot([], {}, {})
    found.blocks = [block("own", False), block("shared", True), block("transposed", True)]
    found.blocks[2].tensor = values.transpose(0, 2).contiguous().transpose(0, 2)
    return found


def staged(found: Snapshot, chunk_bytes: int, size: int) -> dict[int, str]:
    """Stage a snapshot and then overwrite it; return its digests."""
    items = Items.of(found, Quantization(), chunk_bytes)
    memory, ring = StagingMemory(size, shared=False, pinned=False), Ring(size)
    staging = Staging(memory, ring, items, frozenset())
    digests: dict[int, str] = {}
    told = threading.Event()

    def background() -> None:
        told.wait(10)
        digests.update(staging.shared_digests())
        staging.choose(frozenset(items.by_name))
        for name in items.by_name:
            staging.job(name, {}).close()

    thread = threading.Thread(target=background)
    thread.start()
    staging.run(told.set)
    for block in found.blocks:
        block.tensor.zero_()
    told.set()
    thread.join(10)
    memory.close()
    return digests


@pytest.mark.parametrize("size", [1 << 20, 8192], ids=["all", "in parts"])
def test_digests_are_of_the_instant_whatever_the_pieces(size: int) -> None:
    values = torch.arange(37 * 30).reshape(SHAPE) / 7
    first = None
    for chunk_bytes in (100, 3000, 1 << 20):
        digests = staged(snapshot(values), chunk_bytes, size)
        assert set(digests) == {1, 2}
        assert digests[1] == digests[2]  # digests of values, not of memory
        assert first in (None, digests[1])
        first = digests[1]
        live = snapshot(values)
        again = Items.of(live, Quantization(), 500)
        assert {number: again.shared_digest(number) for number in again.shared} == digests
    values[36, 5, 4] += 1
    assert staged(snapshot(values), 3000, size)[1] != first


def test_nothing_is_encoded_for_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    found = snapshot(torch.ones(SHAPE))
    items = Items.of(found, Quantization(), 3000)

    def refuse(*_: object) -> EncodedChunk:
        pytest.fail("encoded in the stall")

    monkeypatch.setattr(Block, "encode", refuse)
    monkeypatch.setattr("torchrec_checknrun.model.blocks.raw_bytes", refuse)
    summary = summarize(Header(bits=None), found, items, Quantization())
    assert [block.digest for block in summary.blocks] == [None] * 3
    with_digests = summary.with_digests({}, {1: "a", 2: "b"})
    assert [block.digest for block in with_digests.blocks] == [None, "a", "b"]
