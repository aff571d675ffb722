"""Check docs/reference/format.md against the code, and read_rows.py against the package."""

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
from msgspec import to_builtins

from tests.unit.chains import DIM, STATES, TABLE, Job, Part, apply_in_order, make_shards, write
from tests.unit.entries import decode_rows, fields
from torchrec_checknrun.codecs import (
    _CODECS,
    Bf16,
    Codec,
    Delta,
    Exact,
    Fisher,
    Fp16,
    ImportanceWeighted,
    KMeans,
    LcCheckpoint,
    Rowwise,
)
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.codecs.row_state import STATE_SCHEMES
from torchrec_checknrun.format import checks, chunk, entries, rank_file, row_ids
from torchrec_checknrun.format.manifest import Manifest, RankFile, TableTotals
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import FOOTER, MAGIC, write_rank_file
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.format.row_ids import ENCODINGS
from torchrec_checknrun.shards import Rectangle, RowBlock, TableShape
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values import state

DOCS = Path(__file__).parents[3] / "docs" / "reference"
FORMAT = (DOCS / "format.md").read_text()
READER = DOCS / "read_rows.py"
ROWS = 3000
read_rows: Callable[..., tuple[np.ndarray, np.ndarray]] = runpy.run_path(str(READER))["read_rows"]

READABLE: list[Codec] = [Exact(), Fp16(), Bf16(), *(Rowwise(bits) for bits in (8, 4, 3, 2))]
"""Codecs that the reader decodes."""
OWN_CODECS = {n for n, c in _CODECS.items() if c.__module__.startswith("torchrec_checknrun.")}
"""Codecs of the package, without the examples', which this process registers as well."""


class Newer(Rowwise):
    version = Rowwise.version + 1


class Unknown(Rowwise):
    name = "unheard_of"


def name_of(codec: Codec) -> str:
    return f"{codec.name}, {codec.value_bits} bit"


def decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def ids_of_every_kind(rows: int) -> list[list[int]]:
    """Draw ids that make a range, a bitmap, gaps, and compressed ones of both."""
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


@pytest.mark.parametrize("compress", [False, True], ids=["", "zstd"])
@pytest.mark.parametrize("codec", READABLE, ids=name_of)
def test_the_reader_reads_what_the_package_reads(
    tmp_path: Path, codec: Codec, compress: bool
) -> None:
    root = Folder(tmp_path)
    encoding = TableEncoding(codec, compress=compress)
    split = [(0, 3), (3, DIM)]
    manifest, every = None, list(range(ROWS))
    seen = set()
    for ids in [every, *ids_of_every_kind(ROWS)]:
        parts = [Part(columns, ids, 2500, encoding=encoding) for columns in split]
        manifest = write(root, ROWS, parts, manifest, ranks=2)
        for file in (tmp_path / manifest.id).glob("rank-*.bin"):
            seen |= {name for name in ENCODINGS if f'"{name}"'.encode() in file.read_bytes()}
    assert manifest is not None
    assert seen == set(ENCODINGS)
    shards = make_shards(ROWS, [Rectangle(0, ROWS, *columns) for columns in split])
    apply_in_order(root, manifest.id, shards)
    expected = torch.cat([shard.weight for shard in shards], dim=1).numpy()
    found, weights = read_rows(tmp_path, manifest.id, TABLE, decompress)
    assert found.tolist() == every
    if not isinstance(codec, Rowwise):
        assert weights.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_max_ulp(weights, expected, 1)


@pytest.mark.parametrize(
    "codec",
    [
        ImportanceWeighted(),
        KMeans(4),
        KMeans(2),
        KMeans(4, block_rows=8),
        Fisher(step=2.0**-12),
        Delta(step=2.0**-12),
        LcCheckpoint(3),
        Newer(4),
        Unknown(8),
    ],
    ids=[
        "importance",
        "4 bit k-means",
        "2 bit k-means",
        "blocks",
        "fisher",
        "delta",
        "lc",
        "newer",
        "unknown",
    ],
)
def test_the_reader_refuses_what_it_does_not_decode(tmp_path: Path, codec: Codec) -> None:
    part = Part((0, DIM), list(range(24)), 24, encoding=TableEncoding(codec))
    manifest = write(Folder(tmp_path), 24, [part])
    with pytest.raises(ValueError, match=rf"stored as .*'{codec.name}'.*`checknrun export`"):
        read_rows(tmp_path, manifest.id, TABLE, decompress)


def test_all_codecs_are_read_or_refused() -> None:
    refused = {"importance", "kmeans", "fisher", "delta", "lc"}
    assert {codec.name for codec in READABLE} == OWN_CODECS - refused
    (said,) = (text for text in FORMAT.split("\n\n") if "read_rows.py" in text)
    assert {name for name in OWN_CODECS if f"`{name}`" in said} == OWN_CODECS
    assert all(said.index("refuses") < said.index(f"`{name}`") for name in refused)


def one_chunk(
    path: Path, weight: torch.Tensor, encoding: TableEncoding
) -> tuple[dict[str, Any], torch.Tensor]:
    """Write a checkpoint ``one`` of a table ``t``; return its chunk's entry and decoded rows."""
    n, dim = weight.shape
    block = RowBlock("t", TableShape(n, dim), (0, dim), torch.arange(n), weight, None, {})
    chunk = encode_rows(block, encoding)
    folder = Folder(path) / "one"
    folder.create()
    file = write_rank_file(folder, 0, iter([Job(chunk)])).file
    document = {"id": "one", "parent": None, "tables": {"t": {"rows": n, "dim": dim}}}
    files = [to_builtins(file)]
    folder.put(MANIFEST_NAME, json.dumps({"manifest": {**document, "files": files}}).encode())
    return fields(chunk), decode_rows(chunk.entry, chunk.getvalue()).weight


@pytest.mark.parametrize("codec", READABLE, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_tables_of_other_types(tmp_path: Path, dtype: torch.dtype, codec: Codec) -> None:
    """Include exceptions, which are stored in the table's dtype."""
    weight = torch.randn((50, 5)).to(dtype)
    weight[7] = torch.inf
    entry, expected = one_chunk(tmp_path, weight, TableEncoding(codec, compress=True))
    stored = entry["weight"]["codec"][
        "name"
    ]  # stored exactly where the codec would need as many bytes
    held = {"exact": dtype, "fp16": torch.float16, "bf16": torch.bfloat16}.get(stored)
    assert ("exceptions" in entry["weight"]) == (held is not dtype)
    _, weights = read_rows(tmp_path, "one", "t", decompress)
    # A restore rounds to the table's type; the reader does not.
    assert torch.equal(torch.from_numpy(weights).to(dtype), expected.float().to(dtype))


def test_rows_that_were_scaled(tmp_path: Path) -> None:
    """Make all rows so small that fp16 would lose their scale."""
    entry, expected = one_chunk(tmp_path, torch.randn((50, DIM)) * 1e-7, TableEncoding(Rowwise(4)))
    assert "exponent" in entry["weight"]["parameters"]
    _, weights = read_rows(tmp_path, "one", "t")
    np.testing.assert_array_max_ulp(weights, expected.numpy(), 1)


@pytest.mark.parametrize(
    ("name", "lines"),
    [("read_rows", 60), ("read_deltas", 100), ("read_lc", 70), ("read_states", 70)],
)
def test_the_readers_are_short_and_need_only_numpy(name: str, lines: int) -> None:
    text = READER.with_name(f"{name}.py").read_text()
    assert len(text.splitlines()) <= lines
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for name in node.names
    } | {str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    own = {"read_rows", "read_deltas"}
    assert imported - own - (sys.stdlib_module_names if name == "read_rows" else {"json"}) == {
        "numpy"
    }
    assert f"{name}.py" in FORMAT


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
    """Explain all of the code's fields, encodings, kinds and limits in the document."""
    names: set[str] = {*ENCODINGS, *OWN_CODECS, *STATE_SCHEMES, *STATES}
    for kind in (Manifest, RankFile, TableTotals):
        names |= set(kind.__struct_fields__)
    for struct in entries.Placed.__subclasses__() + entries.Section.__subclasses__():
        names |= set(struct.__struct_fields__)
    names |= {"rows", "block", "state", "collisions", MAGIC.decode()}
    missing = {name for name in names if f"`{name}`" not in FORMAT}
    assert missing - {"exp_avg"} == set()
    for limit in (
        checks.MANIFEST_BYTES >> 20,
        checks.INDEX_BYTES >> 20,
        rank_file.LARGEST_CHUNK >> 20,
        chunk.DECODED_BYTES >> 20,
    ):
        assert f"{limit:,} MiB" in FORMAT
    assert f"{checks.VALUES:,} values" in FORMAT
    assert f"{state.MOST_DEPTH} containers deep" in FORMAT
    assert f"{row_ids._BITMAP_BYTES_PER_ROW} bytes" in FORMAT
