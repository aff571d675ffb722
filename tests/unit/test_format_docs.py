"""docs/format.md is true, and docs/read_rows.py reads what the package reads."""

from __future__ import annotations

import ast
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard

from tests.unit.chains import DIM, STATES, TABLE, Job, Part, apply_in_order, make_shards, write
from torchrec_checknrun import index, row_ids, sections, state, untrusted
from torchrec_checknrun.codecs import _CODECS, Exact, Rowwise
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES
from torchrec_checknrun.filesystem import Folder
from torchrec_checknrun.manifest import MANIFEST_NAME, Manifest, RankFile, TableTotals
from torchrec_checknrun.quantization import Encoding
from torchrec_checknrun.rank_file import FOOTER, MAGIC, write_rank_file
from torchrec_checknrun.row_chunks import encode_rows
from torchrec_checknrun.row_ids import ENCODINGS
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape
from torchrec_checknrun.stored_rows import decode_rows

DOCS = Path(__file__).parents[2] / "docs"
FORMAT = (DOCS / "format.md").read_text()
READER = DOCS / "read_rows.py"
ROWS = 3000
read_rows: Callable[..., tuple[np.ndarray, np.ndarray]] = runpy.run_path(str(READER))["read_rows"]


def decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def ids_of_every_kind(rows: int) -> list[list[int]]:
    """Which make a range, a bitmap, gaps, and compressed ones of both."""
    generator = np.random.default_rng(5)
    return [
        list(range(100, 400)),
        np.flatnonzero(generator.random(rows) < 0.5).tolist(),
        np.flatnonzero(generator.random(rows) < 0.01).tolist(),
        list(range(3, rows, 7)),
        [*np.flatnonzero(generator.random(1500) < 0.5).tolist(), *range(1500, rows)],
        [7, 8, 2999],
        [42],
    ]


@pytest.mark.parametrize(
    ("codec", "compress"),
    [
        (Exact(), False),
        (Exact(), True),
        (Rowwise(8), True),
        (Rowwise(4), False),
        (Rowwise(2), True),
    ],
    ids=["exact", "exact, zstd", "8 bit, zstd", "4 bit", "2 bit, zstd"],
)
def test_the_reader(tmp_path: Path, codec: Any, compress: bool) -> None:
    root = Folder(tmp_path)
    encoding = Encoding(codec, compress=compress)
    split = [(0, 3), (3, DIM)]
    manifest, every = None, list(range(ROWS))
    seen = set()
    for ids in [every, *ids_of_every_kind(ROWS)]:
        parts = [Part(columns, ids, 2500, encoding=encoding) for columns in split]
        manifest = write(root, ROWS, parts, manifest, ranks=2)
        for file in (tmp_path / manifest.id).glob("rank-*.bin"):
            seen |= {name for name in ENCODINGS if f'"{name}"'.encode() in file.read_bytes()}
    assert manifest is not None
    assert seen == set(ENCODINGS) - {"offsets"}
    shards = make_shards(ROWS, [Rectangle(0, ROWS, *columns) for columns in split])
    apply_in_order(root, manifest.id, shards)
    expected = torch.cat([shard.weight for shard in shards], dim=1).numpy()
    found, weights = read_rows(tmp_path, manifest.id, TABLE, decompress)
    assert found.tolist() == every
    if isinstance(codec, Exact):
        assert weights.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_max_ulp(weights, expected, 1)


def test_rows_that_were_scaled(tmp_path: Path) -> None:
    """All of them so small that fp16 would lose their scale."""
    weight = torch.randn((50, DIM)) * 1e-7
    block = RowBlock("t", TableShape(50, DIM), (0, DIM), torch.arange(50), weight, None, {})
    chunk = encode_rows(block, Encoding(Rowwise(4)))
    assert "exponent" in chunk.entry["weight"]["parameters"]
    folder = Folder(tmp_path) / "one"
    folder.create()
    file = write_rank_file(folder, 0, iter([Job(chunk)])).file
    document = {"id": "one", "parent": None, "tables": {"t": {"rows": 50, "dim": DIM}}}
    files = [vars(file)]
    folder.put(MANIFEST_NAME, json.dumps({"manifest": {**document, "files": files}}).encode())
    _, weights = read_rows(tmp_path, "one", "t")
    expected = decode_rows(chunk.entry, chunk.getvalue()).weight.numpy()
    np.testing.assert_array_max_ulp(weights, expected, 1)


def test_the_reader_is_short_and_needs_only_numpy() -> None:
    text = READER.read_text()
    assert len(text.splitlines()) <= 60
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for name in node.names
    } | {str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"numpy"}
    assert "read_rows.py" in FORMAT


def test_the_layout_of_files(tmp_path: Path) -> None:
    manifest = write(Folder(tmp_path), 10, [Part((0, DIM), list(range(10)), 4)], ranks=2)
    data = (tmp_path / manifest.id / MANIFEST_NAME).read_bytes()
    head = b'{"checksum":"' + manifest.checksum.encode() + b'","manifest":'
    assert data.startswith(head)
    assert data.endswith(b"}}")
    assert xxhash.xxh3_128_hexdigest(data[len(head) : -1]) == manifest.checksum
    assert len(head) == 13 + 32 + 13
    for file in manifest.files:
        content = (tmp_path / manifest.id / file.name).read_bytes()
        offset, length, checksum, magic = FOOTER.unpack(content[-FOOTER.size :])
        assert (offset, length, magic) == (file.index_offset, file.index_length, MAGIC)
        assert offset + length + FOOTER.size == len(content) == file.size
        entries = json.loads(content[offset : offset + length])["chunks"]
        assert xxhash.xxh3_64_hexdigest(content[offset : offset + length]).encode() == checksum
        end = 0
        for entry in entries:
            assert entry["offset"] == end
            end += entry["length"]
            payload = content[entry["offset"] : end]
            assert xxhash.xxh3_64_hexdigest(payload) == entry["checksum"]
        assert end == offset
    assert FOOTER.size == 40
    assert MAGIC == b"CHKNRUN1"


def test_everything_is_named() -> None:
    """Fields, encodings, kinds and limits: what the code has, the document explains."""
    names: set[str] = {*ENCODINGS, *_CODECS, *STATE_SCHEMES, *STATES}
    for kind in (Manifest, RankFile, TableTotals):
        names |= set(kind.__dataclass_fields__)
    names |= set(index.row_chunks._FIELDS) | set(index.blocks._FIELDS)
    names |= {"rows", "block", "state", "collisions", MAGIC.decode()}
    missing = {name for name in names if f"`{name}`" not in FORMAT}
    assert missing - {"exp_avg"} == set()
    for limit in (
        untrusted.MANIFEST_BYTES >> 20,
        untrusted.INDEX_BYTES >> 20,
        index.CHUNK_BYTES >> 20,
        sections.DECODED_BYTES >> 20,
    ):
        assert f"{limit:,} MiB" in FORMAT
    assert f"{untrusted.VALUES:,} values" in FORMAT
    assert f"{state.MOST_DEPTH} containers deep" in FORMAT
    assert f"{row_ids._BITMAP_BYTES_PER_ROW} bytes" in FORMAT
