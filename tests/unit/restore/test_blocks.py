"""Save and restore sharded tensors other than tables piece by piece, or refuse them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from tests.unit.boxes import tilings
from tests.unit.entries import block_of, fields
from torchrec_checknrun.boxes import Box
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint, InvalidPlan
from torchrec_checknrun.format.chunk import EncodedChunk, Path
from torchrec_checknrun.model.blocks import Block, BlockSummary, check_blocks
from torchrec_checknrun.restore.blocks import BlockRestore, SavedBlocks, saved_blocks

PATH: Path = ("model", 3, "ids")
SIZES = {"one": (11,), "two": (11, 6)}
LAYOUTS = {
    "whole": [((0, 11), (0, 6))],
    "rows": [((0, 4), (0, 6)), ((4, 5), (0, 6)), ((5, 11), (0, 6))],
    "columns": [((0, 11), (0, 2)), ((0, 11), (2, 6))],
    "both": [((0, 3), (0, 6)), ((3, 11), (0, 5)), ((3, 11), (5, 6))],
}
DTYPES = [torch.int64, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.complex64]


def whole(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(torch.Size(size).numel()).reshape(size) * 7 % 23
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def split(tensor: torch.Tensor, layout: list[Any]) -> list[Block]:
    """Return parts as views of the tensor, so that column shards are not contiguous."""
    boxes = [Box(tuple(spans[: tensor.dim()])) for spans in layout]
    return cut(tensor, boxes)


def cut(tensor: torch.Tensor, boxes: list[Box]) -> list[Block]:
    whole = Box.whole(tensor.shape)
    return [Block(PATH, tuple(tensor.shape), box, tensor[box.slices(whole)]) for box in boxes]


def pieces(blocks: list[Block], chunk_bytes: int) -> dict[str, EncodedChunk]:
    """Encode pieces as in a rank file, by name."""
    found: dict[str, EncodedChunk] = {}
    for block in blocks:
        for piece in block.pieces(chunk_bytes):
            chunk = block.encode(piece)
            chunk.entry = replace(chunk.entry, length=len(chunk.getvalue()))
            found[f"piece{len(found)}"] = chunk
    return found


def saved(chunks: dict[str, EncodedChunk]) -> SavedBlocks:
    return saved_blocks({name: block_of(chunk.entry) for name, chunk in chunks.items()})


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_any_layout_into_any_other(size: str, dtype: torch.dtype, chunk_bytes: int) -> None:
    names = ["whole", "rows"] if size == "one" else list(LAYOUTS)
    values = whole(SIZES[size], dtype)
    for of_saved in names:
        chunks = pieces(split(values, LAYOUTS[of_saved]), chunk_bytes)
        assert sum(chunk.entry.length for chunk in chunks.values()) == values.nbytes
        bound = max(values.element_size(), chunk_bytes // 5)
        assert all(chunk.entry.length <= bound for chunk in chunks.values())
        for wanted in names:
            live = torch.zeros(SIZES[size], dtype=dtype)
            restore = BlockRestore(split(live, LAYOUTS[wanted]), saved(chunks), strict=True)
            needed = restore.plan("seq-1", ["model"])
            assert sorted(needed) == sorted(chunks)
            for name in needed:
                restore.load(block_of(chunks[name].entry), chunks[name].getvalue())
            assert torch.equal(live, values)


def test_only_what_overlaps_is_read() -> None:
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["rows"]), 10**6)
    live = torch.zeros(11, dtype=torch.int64)
    block = Block(PATH, (11,), Box(((5, 8),)), live[5:8])
    restore = BlockRestore([block], saved(chunks), strict=True)
    assert restore.plan("seq-1", []) == ["piece2"]
    ((found, layout),) = restore.blocks()
    assert found is block
    assert layout == ((0, 4), (4, 5), (5, 11))
    restore.load(block_of(chunks["piece2"].entry), chunks["piece2"].getvalue())
    assert live.tolist() == [0] * 5 + whole((11,), torch.int64)[5:8].tolist() + [0] * 3


MISFITS: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {
    "missing": ((11,), torch.int64, r"^model\.3\.other is not in seq-1: .*strict=False"),
    "size": (
        (12,),
        torch.int64,
        r"^model\.3\.ids is int64 \[11\] in seq-1, and int64 \[12\] in the model",
    ),
    "dtype": ((11,), torch.int32, r"int64 \[11\] in seq-1, and int32 \[11\] in the model"),
    "dimensions": (
        (11, 1),
        torch.int64,
        r"int64 \[11\] in seq-1, and int64 \[11, 1\] in the model",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_an_incompatible_tensor(what: str) -> None:
    size, dtype, match = MISFITS[what]
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["rows"]), 10**6)
    path = ("model", 3, "other") if what == "missing" else PATH
    live = torch.zeros(size, dtype=dtype)
    block = Block(path, size, Box.whole(size), live)
    with pytest.raises(IncompatibleCheckpoint, match=match):
        BlockRestore([block], saved(chunks), strict=True).plan("seq-1", ["other"])
    restore = BlockRestore([block], saved(chunks), strict=False)
    assert restore.plan("seq-1", ["model"]) == []
    assert list(restore.blocks()) == []
    for chunk in chunks.values():
        restore.load(block_of(chunk.entry), chunk.getvalue())
    assert not live.any()
    only_saved = ["state model.3.ids: only in the checkpoint"] if what == "missing" else []
    assert restore.skipped[:-1] == only_saved
    assert restore.skipped[-1].startswith(f"state model.3.{path[-1]} is")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("missing", range(3))
def test_a_piece_is_missing(missing: int, strict: bool) -> None:
    values = whole((11, 6), torch.float16)
    chunks = pieces(split(values, LAYOUTS["both"]), 10**6)
    area = block_of(chunks.pop(f"piece{missing}").entry).box.volume
    restore = BlockRestore(split(values, LAYOUTS["whole"]), saved(chunks), strict)
    match = rf"seq-1 holds {66 - area} of the 66 values of model\.3\.ids\[0:11, 0:6\]"
    with pytest.raises(CorruptCheckpoint, match=match):
        restore.plan("seq-1", ["model"])


@pytest.mark.parametrize(
    "broken",
    [
        {"size": [4]},
        {"size": []},
        {"size": [11, 6, 1]},
        {"size": [2**62, 2**62]},
        {"size": [11] + [0] * 40},
        {"part": [[0, 12]]},
        {"part": [[5, 4]]},
        {"part": [[-1, 4]]},
        {"part": [[0]]},
        {"part": [[0, 11], [0, 1]]},
        {"part": []},
        {"shard": [[0, 10]]},
        {"shard": [[0, 12]]},
        {"shard": None},
        {"dtype": "int65"},
        {"dtype": "int32"},
        {"length": 80},
        {"path": None},
        {"path": []},
        {"path": ["x"] * 5000},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_malformed_entry(broken: dict[str, Any]) -> None:
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["whole"]), 10**6)
    entry = json.loads(json.dumps(fields(chunks["piece0"])))
    assert block_of(entry).path == PATH
    with pytest.raises(CorruptCheckpoint, match="index entry of a block chunk is malformed"):
        block_of({**entry, **broken})
    for field in ("size", "part", "shard", "dtype", "path"):
        with pytest.raises(CorruptCheckpoint, match="malformed"):
            block_of({k: v for k, v in entry.items() if k != field})


def summary(
    *rows: int, dtype: str = "int64", size: int = 11, digest: str | None = None
) -> BlockSummary:
    return BlockSummary(PATH, dtype, (size,), Box(((rows[0], rows[1]),)), digest)


def test_parts_that_make_a_whole() -> None:
    parts = [(summary(4, 11), 0), (summary(0, 2), 1), (summary(2, 4), 1)]
    assert check_blocks(PATH, parts) == set()


def test_the_same_part_on_meshes_of_their_own_is_written_once() -> None:
    parts = [
        (summary(0, 5, digest="a"), 2),
        (summary(0, 5, digest="a"), 0),
        (summary(5, 11, digest="b"), 1),
        (summary(5, 11, digest="b"), 3),
    ]
    assert check_blocks(PATH, parts) == {0, 3}


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([summary(0, 5), summary(4, 11)], r"^model\.3\.ids: ranks 0 and 1 would both write "),
        ([summary(0, 11), summary(0, 11)], "ranks 0 and 1 would both write "),
        ([summary(0, 5), summary(6, 11)], r"^model\.3\.ids: the ranks hold 10 of 11 values"),
        ([summary(0, 5)], "the ranks hold 5 of 11 values"),
        (
            [summary(0, 5), summary(5, 11, dtype="int32")],
            r"is int64 \[11\] on rank 0 and int32 \[11\] on rank 1",
        ),
        (
            [summary(0, 11, digest="a"), summary(0, 11, digest="b")],
            r"ids: ranks 0 and 1 hold \[0:11\] each on a mesh of its own, with different values",
        ),
        ([summary(0, 5), summary(5, 11, size=12)], r"int64 \[11\] on rank 0 and int64 \[12\] on"),
    ],
)
def test_parts_that_do_not(parts: list[BlockSummary], match: str) -> None:
    with pytest.raises(InvalidPlan, match=match):
        check_blocks(PATH, [(part, rank) for rank, part in enumerate(parts)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], list[Box], int]:
    """Draw a tensor of any number of dimensions, two ways to cut the tensor, and a chunk size."""
    size = draw(st.lists(st.integers(1, 5), max_size=5))
    values = whole(tuple(size), draw(st.sampled_from(DTYPES)))
    box = Box.whole(size)
    return values, draw(tilings(box)), draw(tilings(box)), draw(st.integers(1, 300))


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.data())
def test_any_cut_into_any_other(
    case: tuple[torch.Tensor, list[Box], list[Box], int], data: st.DataObject
) -> None:
    values, before, after, chunk_bytes = case
    chunks = pieces([block for block in cut(values, before) if block.box.volume], chunk_bytes)
    live = torch.zeros_like(values)
    wanted = [block for block in cut(live, after) if block.box.volume]
    restore = BlockRestore(wanted, saved(chunks), strict=True)
    for name in restore.plan("seq-1", ["model"]):
        restore.load(block_of(chunks[name].entry), chunks[name].getvalue())
    assert torch.equal(live, values)
    lost = data.draw(st.sampled_from(sorted(chunks)))
    twice = {**chunks, "again": chunks[lost]}
    with pytest.raises(CorruptCheckpoint, match="or some twice: pieces are missing"):
        BlockRestore(wanted, saved(twice), strict=True).plan("seq-1", ["model"])
    rest = {name: chunk for name, chunk in chunks.items() if name != lost}
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint)):
        BlockRestore(wanted, saved(rest), strict=True).plan("seq-1", ["model"])


FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.mark.parametrize("before", FLOATS, ids=str)
@pytest.mark.parametrize("after", FLOATS, ids=str)
def test_one_type_of_float_into_another(before: torch.dtype, after: torch.dtype) -> None:
    values = (torch.arange(66).reshape(11, 6) / 7).to(before)
    chunks = pieces(split(values, LAYOUTS["both"]), 50)
    live = torch.zeros(11, 6, dtype=after)
    restore = BlockRestore(split(live, LAYOUTS["rows"]), saved(chunks), strict=True)
    for name in restore.plan("seq-1", ["model"]):
        restore.load(block_of(chunks[name].entry), chunks[name].getvalue())
    assert torch.equal(live, values.to(after))


def test_what_only_the_checkpoint_has() -> None:
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["rows"]), 10**6)
    restore = BlockRestore([], saved(chunks), strict=True)
    with pytest.raises(IncompatibleCheckpoint, match="is sharded in seq-1, and there is no tensor"):
        restore.plan("seq-1", ["model"], wholly=["model"])
    # As dcp.load, which restores everything asked for
    assert restore.plan("seq-1", ["model"]) == []
    assert restore.plan("seq-1", ["other"], wholly=["model"]) == []
    # This rank holds no part of the tensor.
    assert restore.plan("seq-1", ["model"], [PATH], wholly=["model"]) == []
