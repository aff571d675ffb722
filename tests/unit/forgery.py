"""Change chains as an attacker would: with valid checksums, which need no key."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash

from tests.unit.chains import DIM, TABLE, Part, make_shards, new_root, restore, write
from torchrec_checknrun.boxes import Box
from torchrec_checknrun.codecs import Exact, Fp16, ImportanceWeighted, KMeans, Rowwise
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import (
    ChainBroken,
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    UnsupportedFormat,
)
from torchrec_checknrun.format.chunk import BlockHeader, EncodedChunk
from torchrec_checknrun.format.entries import StateEntry
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.format.rank_file import FOOTER, MAGIC
from torchrec_checknrun.format.reader import read_chunk
from torchrec_checknrun.model.blocks import Block
from torchrec_checknrun.restore.blocks import BlockRestore, saved_blocks
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.restore.content_tree import with_blocks
from torchrec_checknrun.root.catalog import inventory
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.diff import compare
from torchrec_checknrun.tools.export import export_dcp, export_safetensors
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.writers.lease import latest_claim

ROWS = 60
REFUSALS = (
    ChainBroken,
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    UnsupportedFormat,
)
"""Errors that hostile input may raise."""


@dataclass
class ForgedFile:
    """A rank file.

    Attributes:
        index: its document; each chunk's checksum is updated.
        raw_index: bytes in place of the index, if they are no JSON of ``index``.
    """

    payload: bytearray
    index: Any
    raw_index: bytes | None = None


@dataclass
class Forged:
    """A checkpoint.

    Attributes:
        folder: its directory's name.
        manifest: its document; the facts about files and the parent's checksum are updated.
        last: changes the document afterwards; then only its own checksum is updated.
        raw_manifest: bytes in place of the manifest.
    """

    folder: str
    manifest: dict[str, Any]
    files: dict[str, ForgedFile]
    last: Callable[[dict[str, Any]], None] | None = None
    raw_manifest: Callable[[bytes], bytes] | None = None

    @property
    def entries(self) -> list[Any]:
        """Return the first file's index entries."""
        return self.first.index["chunks"]

    @property
    def first(self) -> ForgedFile:
        return next(iter(self.files.values()))

    def change_manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Register a change of the manifest, made after all other fields are up to date."""
        self.last = change


VALUES = {
    "values": [{1, 2}, {"a", None, (1, b"x")}, frozenset({2.5}), 1j, torch.float16],
    "sizes": (torch.Size([2, 3]), range(0, 9, 2), slice(None, 3), PurePosixPath("a/b"), Path("c")),
}
"""Values of every type that a state may hold beside numbers and tensors."""
SHARDED = torch.arange(24).reshape(4, 3, 2)
"""A tensor stored as pieces of two shards."""


def pieces_of(tensor: torch.Tensor) -> list[EncodedChunk]:
    whole, chunks = Box.whole(tensor.shape), []
    for rows in ((0, 3), (3, 4)):
        box = Box((rows, *whole.spans[1:]))
        block = Block(("model", "over.weight"), tuple(tensor.shape), box, tensor[slice(*rows)])
        chunks += [block.encode(piece) for piece in block.pieces(300)]
    return chunks


def example() -> list[Forged]:
    """Build a full checkpoint and two based on it, with several codecs, id encodings and states."""
    root = new_root()
    packed = TableEncoding(Rowwise(4), "rowlog8", compress=True)
    first = write(
        root,
        ROWS,
        [
            Part((0, 4), list(range(ROWS)), 40, encoding=packed),
            Part((4, DIM), list(range(ROWS)), 60, encoding=TableEncoding(Exact(), compress=True)),
        ],
        ranks=2,
    )
    every_third = list(range(1, ROWS, 3))
    second = write(
        root,
        ROWS,
        [
            Part((0, 4), every_third, 60, encoding=TableEncoding(ImportanceWeighted(), "bf16")),
            Part((4, DIM), [0, 40, 41, 59], 4, encoding=TableEncoding(Fp16())),
        ],
        first,
    )
    encoding = TableEncoding(KMeans(2))
    part = Part((0, 4), list(range(20, 30)), 10, encoding=encoding)
    write(root, ROWS, [part], second, dense=VALUES, sharded=pieces_of(SHARDED))
    return load(root)


def load(root: Folder) -> list[Forged]:
    """Read the checkpoints of a root, oldest first."""
    found = []
    for name in reversed(committed(root)):
        manifest = json.loads((root / name).read(MANIFEST_NAME))["manifest"]
        files = {}
        for file in manifest["files"]:
            data = (root / name).read(file["name"])
            offset = file["index_offset"]
            index = json.loads(data[offset : offset + file["index_length"]])
            files[file["name"]] = ForgedFile(bytearray(data[:offset]), index)
        found.append(Forged(name, manifest, files))
    return found


def seal(root: Folder, chain: list[Forged]) -> str:
    """Write a chain with valid checksums; return its head's id."""
    checksums: dict[str, str] = {}
    for forged in chain:
        folder, manifest = root / forged.folder, copy.deepcopy(forged.manifest)
        folder.create()
        facts = []
        for name, file in forged.files.items():
            data, fact = _file(name, file)
            folder.put(name, data)
            facts.append(fact)
        manifest["files"] = facts
        parent = manifest.get("parent")
        if isinstance(parent, dict) and parent.get("id") in checksums:
            parent["checksum"] = checksums[parent["id"]]
        if forged.last is not None:
            forged.last(manifest)
        canonical = json.dumps(
            manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode("utf-8", "surrogatepass")
        checksum = xxhash.xxh3_128_hexdigest(canonical)
        data = b'{"checksum":"%s","manifest":%s}' % (checksum.encode(), canonical)
        folder.put(MANIFEST_NAME, forged.raw_manifest(data) if forged.raw_manifest else data)
        checksums[forged.folder] = checksum
    return chain[-1].folder


def _file(name: str, file: ForgedFile) -> tuple[bytes, dict[str, Any]]:
    chunks = file.index.get("chunks") if isinstance(file.index, dict) else None
    for entry in chunks if isinstance(chunks, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("checksum"), str):
            offset, length = entry.get("offset"), entry.get("length")
            if type(offset) is int and type(length) is int and min(offset, length) >= 0:
                part = file.payload[offset : offset + length]
                entry["checksum"] = xxhash.xxh3_64_hexdigest(part)
    index = file.raw_index
    if index is None:
        index = json.dumps(file.index, separators=(",", ":")).encode()
    offset, checksum = len(file.payload), xxhash.xxh3_64_hexdigest(index)
    footer = FOOTER.pack(offset, len(index), checksum.encode(), MAGIC)
    data = bytes(file.payload) + index + footer
    fact = {
        "name": name,
        "size": len(data),
        "index_offset": offset,
        "index_length": len(index),
        "index_checksum": checksum,
        "chunks": len(chunks) if isinstance(chunks, list) else 0,
    }
    return data, fact


def _restore_blocks(root: Folder, head: str) -> None:
    content = read_content(root, resolve(root, head))
    chunks = {chunk.key: chunk for chunk in content.chunks[-1]}
    saved = saved_blocks(
        {key: c.header for key, c in chunks.items() if isinstance(c.header, BlockHeader)}
    )
    for chunk in chunks.values():
        if isinstance(chunk.entry, StateEntry):
            with_blocks(chunk.entry.tree, chunk.entry.name, saved)
    live, whole = torch.zeros_like(SHARDED), Box.whole(SHARDED.shape)
    halves = [Box((*whole.spans[:2], (start, start + 1))) for start in (0, 1)]
    wanted = [
        Block(("model", "over.weight"), tuple(live.shape), half, live[half.slices(whole)])
        for half in halves
    ]
    restoring = BlockRestore(wanted, saved, strict=True)
    for key in restoring.plan(head, ["model"]):
        header = chunks[key].header
        assert isinstance(header, BlockHeader)
        restoring.load(header, read_chunk(root, chunks[key]))


def attack(root: Folder, head: str) -> list[str]:
    """Run all readers on a chain.

    Returns:
        The errors, with the reader that raised each; no other error may be raised.
    """
    refused: list[str] = []

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except REFUSALS as error:
            refused.append(f"{name}: {type(error).__name__}: {error}")

    def look() -> None:
        _, problems = newest(root)
        refused.extend(f"newest: {problem}" for problem in problems)

    def check() -> None:
        for found in verify(root.url):
            refused.extend(f"verify: {problem}" for problem in found.problems)

    def read() -> None:
        table = resolve(root, head).head.tables.get(TABLE)
        if table is not None and (table.rows, table.dim) == (ROWS, DIM):
            places = [Rectangle(0, 33, 0, 4), Rectangle(33, ROWS, 0, 4), Rectangle(0, ROWS, 4, DIM)]
            restore(root, head, make_shards(ROWS, places))

    def cat() -> None:
        content = read_content(root, resolve(root, head))
        for table, totals in content.chain.head.tables.items():
            reader = TableReader(content, table, ChunkCache(root))
            reader.rows([row for row in (0, 33, ROWS - 1) if row < totals.rows])

    def export(save: Callable[..., object], **options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save(root, resolve(root, head), folder, **options)

    baseline = committed(root)[-1]
    attempt("resolve", lambda: resolve(root, head))
    attempt("latest_claim", lambda: latest_claim(root))
    attempt("newest", look)
    attempt("verify", check)
    attempt("restore", read)
    attempt("blocks", lambda: _restore_blocks(root, head))
    attempt("ls", lambda: inventory(root))
    attempt("prune", lambda: prune(root, Retention(1, 1.0), dry_run=True))
    attempt("cat", cat)
    attempt("diff", lambda: compare(root.url, baseline, head))
    attempt("diff", lambda: compare(root.url, head, head))
    attempt("export", lambda: export(export_dcp))
    attempt("export", lambda: export(export_safetensors))
    attempt("export", lambda: export(export_safetensors, rows="fused"))
    attempt("compact", lambda: compact(root.url, head))
    return refused
