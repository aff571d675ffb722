"""Compact small chains, and compare what the chain and the compacted checkpoint restore."""

from __future__ import annotations

from typing import Any

import fsspec

from tests.unit.chains import (
    DIM,
    TABLE,
    Part,
    content_of,
    make_shards,
    marked,
    restore,
    same_bits,
    write_chain,
)
from torchrec_checknrun import CheckpointReport, compact
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.store.folder import Folder

WHOLE = (0, DIM)


def compacted(root: Folder, head: str | None = None, **options: Any) -> CheckpointReport:
    report = compact(root.url, head, **options)
    assert report is not None
    return report


def assert_restores_alike(root: Folder, one: str, other: str, places: list[Rectangle]) -> None:
    rows = content_of(root, one).chain.head.tables[TABLE].rows
    shards, wanted = make_shards(rows, places), make_shards(rows, places)
    restore(root, one, wanted)
    marks, _ = restore(root, other, shards)
    for shard, plain in zip(shards, wanted, strict=True):
        assert same_bits(shard.weight, plain.weight)
        for name, state in shard.optimizer.items():
            assert same_bits(state, plain.optimizer[name])
    assert not any(marked(of_shard).any() for of_shard in marks)


def small_chain(root: Folder, encoding: TableEncoding | None = None) -> str:
    options: dict[str, Any] = {"encoding": encoding} if encoding else {}
    chain = [
        [Part(WHOLE, list(range(100)), 10, **options)],
        [Part(WHOLE, [5, 15, 25, 31, 39], 2, **options)],
        [Part(WHOLE, list(range(20, 45)), 5, **options)],
    ]
    return write_chain(root, 100, chain, ranks=2)


def flip(root: Folder, checkpoint: str, file: str, offset: int) -> None:
    filesystem, path = fsspec.core.url_to_fs(f"{root.url}/{checkpoint}/{file}")
    data = bytearray(filesystem.cat_file(path))
    data[offset] ^= 4
    filesystem.pipe_file(path, bytes(data))
