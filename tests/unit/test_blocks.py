"""Sharded tensors that are no tables, piece by piece, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_checknrun.blocks import (
    Block,
    BlockRestore,
    BlockSummary,
    Path,
    block_header,
    check_blocks,
)
from torchrec_checknrun.chunks import EncodedChunk, Entry
from torchrec_checknrun.errors import CorruptCheckpoint, IncompatibleCheckpoint, InvalidPlan
from torchrec_checknrun.shards import Rectangle

PATH: Path = ("model", 3, "ids")
SIZES = {"one": (11,), "two": (11, 6)}
LAYOUTS = {
    "whole": [Rectangle(0, 11, 0, 6)],
    "rows": [Rectangle(0, 4, 0, 6), Rectangle(4, 5, 0, 6), Rectangle(5, 11, 0, 6)],
    "columns": [Rectangle(0, 11, 0, 2), Rectangle(0, 11, 2, 6)],
    "both": [Rectangle(0, 3, 0, 6), Rectangle(3, 11, 0, 5), Rectangle(3, 11, 5, 6)],
}
DTYPES = [torch.int64, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.complex64]


def whole(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(torch.Size(size).numel()).reshape(size) * 7 % 23
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def split(tensor: torch.Tensor, layout: list[Rectangle]) -> list[Block]:
    """Shards as views of the tensor, so that column shards are not contiguous."""
    blocks = []
    for r in layout:
        if tensor.dim() == 1:
            r = Rectangle(r.row_start, r.row_stop, 0, 1)
            part = tensor[r.row_start : r.row_stop]
        else:
            part = tensor[r.row_start : r.row_stop, r.col_start : r.col_stop]
        blocks.append(Block(PATH, tuple(tensor.shape), r, part))
    return blocks


def pieces(blocks: list[Block], chunk_bytes: int) -> dict[str, EncodedChunk]:
    """As a rank file has them, by name."""
    found: dict[str, EncodedChunk] = {}
    for block in blocks:
        for start, stop in block.spans(chunk_bytes):
            chunk = block.encode(start, stop)
            chunk.entry["length"] = len(chunk.getvalue())
            found[f"piece{len(found)}"] = chunk
    return found


def entries(chunks: dict[str, EncodedChunk]) -> dict[str, Entry]:
    return {name: chunk.entry for name, chunk in chunks.items()}


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_any_layout_into_any_other(size: str, dtype: torch.dtype, chunk_bytes: int) -> None:
    names = ["whole", "rows"] if size == "one" else list(LAYOUTS)
    values = whole(SIZES[size], dtype)
    for saved in names:
        chunks = pieces(split(values, LAYOUTS[saved]), chunk_bytes)
        assert sum(chunk.entry["length"] for chunk in chunks.values()) == values.nbytes
        row = values.element_size() * (6 if size == "two" else 1)
        bound = max(row, chunk_bytes // 5)
        assert all(chunk.entry["length"] <= bound for chunk in chunks.values())
        for wanted in names:
            live = torch.zeros(SIZES[size], dtype=dtype)
            restore = BlockRestore(split(live, LAYOUTS[wanted]), strict=True)
            needed = restore.plan(entries(chunks), "seq-1", ["model"])
            assert sorted(needed) == sorted(chunks)
            for name in needed:
                restore.load(chunks[name].entry, chunks[name].getvalue())
            assert torch.equal(live, values)


def test_only_what_overlaps_is_read() -> None:
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["rows"]), 10**6)
    live = torch.zeros(11, dtype=torch.int64)
    block = Block(PATH, (11,), Rectangle(5, 8, 0, 1), live[5:8])
    restore = BlockRestore([block], strict=True)
    assert restore.plan(entries(chunks), "seq-1", []) == ["piece2"]
    ((found, layout),) = restore.blocks()
    assert found is block
    assert layout == ((0, 4), (4, 5), (5, 11))
    restore.load(chunks["piece2"].entry, chunks["piece2"].getvalue())
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
def test_a_misfit(what: str) -> None:
    size, dtype, match = MISFITS[what]
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["rows"]), 10**6)
    path = ("model", 3, "other") if what == "missing" else PATH
    live = torch.zeros(size, dtype=dtype)
    block = Block(path, size, Rectangle(0, size[0], 0, 1), live)
    with pytest.raises(IncompatibleCheckpoint, match=match):
        BlockRestore([block], strict=True).plan(entries(chunks), "seq-1", ["model"])
    restore = BlockRestore([block], strict=False)
    assert restore.plan(entries(chunks), "seq-1", ["model"]) == []
    assert list(restore.blocks()) == []
    for chunk in chunks.values():
        restore.load(chunk.entry, chunk.getvalue())
    assert not live.any()
    only_saved = ["state model.3.ids: only in the checkpoint"] if what == "missing" else []
    assert restore.skipped[:-1] == only_saved
    assert restore.skipped[-1].startswith(f"state model.3.{path[-1]} is")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("missing", range(3))
def test_a_piece_is_missing(missing: int, strict: bool) -> None:
    values = whole((11, 6), torch.float16)
    chunks = pieces(split(values, LAYOUTS["both"]), 10**6)
    area = block_header(chunks.pop(f"piece{missing}").entry).rectangle.area
    restore = BlockRestore(split(values, LAYOUTS["whole"]), strict)
    match = rf"seq-1 holds {66 - area} of the 66 values of model\.3\.ids\[0:11, 0:6\]"
    with pytest.raises(CorruptCheckpoint, match=match):
        restore.plan(entries(chunks), "seq-1", ["model"])


@pytest.mark.parametrize(
    "broken",
    [
        {"size": [4]},
        {"size": []},
        {"size": [11, 6, 1]},
        {"rows": [0, 12]},
        {"rows": [5, 4]},
        {"rows": [-1, 4]},
        {"rows": [0]},
        {"columns": [0, 2]},
        {"dtype": "int65"},
        {"dtype": "int32"},
        {"length": 80},
        {"shard_rows": None},
        {"path": None},
    ],
    ids=str,
)
def test_a_malformed_entry(broken: dict[str, Any]) -> None:
    chunks = pieces(split(whole((11,), torch.int64), LAYOUTS["whole"]), 10**6)
    entry = chunks["piece0"].entry
    assert block_header(entry).path == PATH
    with pytest.raises(CorruptCheckpoint, match="index entry of a block is malformed"):
        block_header({**entry, **broken})
    for field in ("size", "rows", "columns", "dtype", "shard_rows", "path"):
        with pytest.raises(CorruptCheckpoint, match="malformed"):
            block_header({k: v for k, v in entry.items() if k != field})


def summary(*rows: int, dtype: str = "int64", size: int = 11) -> BlockSummary:
    return BlockSummary(PATH, dtype, (size,), Rectangle(rows[0], rows[1], 0, 1))


def test_parts_that_make_a_whole() -> None:
    check_blocks(PATH, [(summary(4, 11), 0), (summary(0, 2), 1), (summary(2, 4), 1)])


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([summary(0, 5), summary(4, 11)], r"^model\.3\.ids: ranks 0 and 1 would both write "),
        ([summary(0, 11), summary(0, 11)], "ranks 0 and 1 would both write "),
        ([summary(0, 5), summary(6, 11)], r"^model\.3\.ids: the ranks hold 10 of 11 × 1 values"),
        ([summary(0, 5)], "the ranks hold 5 of 11 × 1 values"),
        (
            [summary(0, 5), summary(5, 11, dtype="int32")],
            r"is int64 \[11\] on rank 0 and int32 \[11\] on rank 1",
        ),
        ([summary(0, 5), summary(5, 11, size=12)], r"int64 \[11\] on rank 0 and int64 \[12\] on"),
    ],
)
def test_parts_that_do_not(parts: list[BlockSummary], match: str) -> None:
    with pytest.raises(InvalidPlan, match=match):
        check_blocks(PATH, [(part, rank) for rank, part in enumerate(parts)])
