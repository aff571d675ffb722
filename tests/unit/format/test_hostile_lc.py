"""Refuse hostile chains of tables stored by ``lc``: checksums are valid, content is not."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.golden.make_deltas import DTYPES, LC_BITS, ROWS
from tests.unit.chains import new_root, same_bits
from tests.unit.forgery import load, seal
from tests.unit.format.test_hostile_deltas import (
    TABLE,
    Change,
    in_codec,
    in_deltas,
    in_weight,
    other_rows,
    refusals,
    rows_of,
    swapped,
    without_deltas,
    without_link,
)
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.links import build_table
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.tools.verify import verify

pytestmark = pytest.mark.usefixtures("small_operations")

GOLDEN = Path(__file__).parents[2] / "golden" / "lc"
CHANGES: dict[str, tuple[str, Change]] = {
    "a base with links": ("differences in a full", in_weight(0, parameters={"link": True})),
    "a base of another type": ("take", in_weight(0, parameters={"values": "fp16"})),
    "a base of an unknown type": ("fp8", in_weight(0, parameters={"values": "fp8"})),
    "a link that says it is none": ("take", without_link),
    "links of another codec": ("another codec|another version", in_weight(2, codec={
        "name": "delta", "version": 1, "step": 0.5})),
    "another codec": ("nothing can build on|can't be decoded|take", in_weight(2, codec={
        "name": "exact", "version": 1})),
    "exceptions": ("can't hold", in_weight(2, exceptions={"rows": 0, "bytes": 0})),
    "a newer version": ("version 2", in_codec(version=2)),
    "an unknown option": ("unexpected|argument", in_codec(power=2)),
    "other bits than the payload's": ("other than 4 bits", in_codec(bits=LC_BITS[TABLE] + 1)),
    "bits of no codec": ("one of", in_codec(bits=5)),
    "bits of text": ("one of", in_codec(bits="3")),
    "other digests in the end": ("digest", in_deltas(-1, after="0" * 16)),
    "other digests in between": ("digest", in_deltas(2, before="0" * 16)),
    "a link without digests": ("as differences", without_deltas),
    "other rows": ("digest|predecessor|other bytes", other_rows),
    "links that changed places": ("digest|predecessor|rows", swapped),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_chains_are_refused(name: str) -> None:
    words, change = CHANGES[name]
    root, chain = new_root(), load(Folder(GOLDEN))
    assert refusals(root, seal(root, chain)) == []
    root, chain = new_root(), load(Folder(GOLDEN))
    change(chain)
    head = seal(root, chain)
    problems = [problem for found in verify(root.url) for problem in found.problems]
    assert problems
    found = refusals(root, head)
    assert len(found) >= 2, found  # a window of rows alone can't compare digests of tables
    assert any(re.search(words, text) for text in [*found, *problems]), [*found, *problems]


@pytest.mark.parametrize("seed", range(60))
def test_random_payloads_are_refused_or_have_another_digest(seed: int) -> None:
    """Change bytes of links and bases under valid checksums: nothing but an error of ours."""
    draw = random.Random(seed)
    root, chain = new_root(), load(Folder(GOLDEN))
    forged = draw.choice(chain)
    table = draw.choice(list(DTYPES))
    entry = rows_of(forged, table)
    file = next(f for f in forged.files.values() if entry in f.index["chunks"])
    start = entry["offset"] + entry["ids"]["bytes"]
    for _ in range(draw.randint(1, 3)):
        at = start + draw.randrange(entry["weight"]["bytes"])
        file.payload[at] = draw.randrange(256)
    content = read_content(root, resolve(root, seal(root, chain)))
    with suppress(CorruptCheckpoint):
        build_table(root, content, table)  # which compares digests
        found = TableReader(content, table, ChunkCache(root)).window(0, ROWS)
        golden = Folder(GOLDEN)
        content = read_content(golden, resolve(golden, content.chain.head.id))
        wanted = TableReader(content, table, ChunkCache(golden)).window(0, ROWS)
        assert same_bits(found.weight, wanted.weight)  # nothing was changed
