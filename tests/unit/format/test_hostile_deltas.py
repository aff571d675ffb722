"""Refuse hostile chains of differences: checksums are valid, content and digests are not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some_of
from tests.golden.make_deltas import DTYPES, ROWS
from tests.unit.chains import new_root, same_bits
from tests.unit.forgery import Forged, load, seal
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.errors import (
    ChainBroken,
    CorruptCheckpoint,
    UnsupportedFormat,
)
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import newest, resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.links import build_table
from torchrec_checknrun.tools.tables import ChunkCache, TableReader
from torchrec_checknrun.tools.verify import verify

pytestmark = pytest.mark.usefixtures("small_operations")

GOLDEN = Path(__file__).parents[2] / "golden" / "deltas"
TABLE = "bf16"

Change = Callable[[list[Forged]], None]


def rows_of(forged: Forged, table: str = TABLE) -> dict[str, Any]:
    found: dict[str, Any] = next(
        entry
        for file in forged.files.values()
        for entry in file.index["chunks"]
        if entry["kind"] == "rows" and entry["table"] == table
    )
    return found


def in_weight(age: int, **fields: Any) -> Change:
    return lambda chain: rows_of(chain[age])["weight"].update(fields)


def in_codec(**fields: Any) -> Change:
    return lambda chain: rows_of(chain[2])["weight"]["codec"].update(fields)


def in_deltas(age: int, **fields: Any) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        manifest["deltas"][TABLE].update(fields)

    return lambda chain: chain[age].change_manifest(change)


def without_link(chain: list[Forged]) -> None:
    del rows_of(chain[2])["weight"]["parameters"]


def without_deltas(chain: list[Forged]) -> None:
    def change(manifest: dict[str, Any]) -> None:
        del manifest["deltas"]
        manifest["format_version"] = 1

    chain[-1].change_manifest(change)


def other_rows(chain: list[Forged]) -> None:
    """Give a link's chunk other ids: its differences go to other rows."""
    entry = rows_of(chain[1])
    entry["ids"] = {"encoding": "range", "bytes": 0}
    shift = entry["last"] - entry["count"] + 1
    file = next(f for f in chain[1].files.values() if entry in f.index["chunks"])
    at = file.index["chunks"].index(entry)
    removed = entry["length"] - sum(
        part["bytes"]
        for part in (entry["weight"], *entry["optimizer"], entry["weight"].get("exceptions", {}))
        if part
    )
    del file.payload[entry["offset"] : entry["offset"] + removed]
    entry["length"] -= removed
    for later in file.index["chunks"][at + 1 :]:
        later["offset"] -= removed
    entry["first"] = shift


def swapped(chain: list[Forged]) -> None:
    chain[2].files, chain[3].files = chain[3].files, chain[2].files
    for name in ("tables",):
        chain[2].manifest[name], chain[3].manifest[name] = (
            chain[3].manifest[name],
            chain[2].manifest[name],
        )


CHANGES: dict[str, tuple[str, Change]] = {
    "a base with links": ("differences in a full", in_weight(0, parameters={"link": True})),
    "a link that says it is none": ("predecessor", without_link),
    "another codec": ("nothing can build on|can't be decoded|take", in_weight(2, codec={
        "name": "exact", "version": 1})),
    "exceptions": ("can't hold", in_weight(2, exceptions={"rows": 0, "bytes": 0})),
    "a newer version": ("version 2", in_codec(version=2)),
    "an unknown option": ("unexpected|argument", in_codec(power=2)),
    "two ways to choose steps": ("give one", in_codec(mean_bits=3.0)),
    "an endless step": ("positive|not a number", in_codec(step=1e999)),
    "a step of no size": ("positive", in_codec(step=0)),
    "a constant of text": ("positive", in_codec(constant="1")),
    "other digests in the end": ("digest", in_deltas(-1, after="0" * 16)),
    "other digests in between": ("digest", in_deltas(2, before="0" * 16)),
    "a link without digests": ("as differences", without_deltas),
    "other rows": ("digest|predecessor|exceeds|out of range", other_rows),
    "links that changed places": ("digest|predecessor|exceeds|out of range|rows", swapped),
}  # fmt: skip


def refusals(root: Folder, head: str) -> list[str]:
    """Read a chain in every way; return the errors of those that refuse it."""

    def rows() -> None:
        content = read_content(root, resolve(root, head))
        for table in DTYPES:
            TableReader(content, table, ChunkCache(root)).window(0, ROWS)

    def build() -> None:
        content = read_content(root, resolve(root, head))
        for table in DTYPES:
            build_table(root, content, table)

    found = []
    for read in (rows, build, lambda: compact(root.url, head)):
        try:
            read()
        except (ChainBroken, CorruptCheckpoint, UnsupportedFormat) as error:
            found.append(str(error))
    return found


@cache
def is_sound(golden: Path) -> bool:
    """Tell whether all readers take the chain as it is."""
    root, chain = new_root(), load(Folder(golden))
    return refusals(root, seal(root, chain)) == []


def assert_refused(golden: Path, words: str, change: Change) -> None:
    """Assert that all readers refuse a changed chain, and that one of them names the reason."""
    assert is_sound(golden)
    root, chain = new_root(), load(Folder(golden))
    change(chain)
    head = seal(root, chain)
    problems = [problem for found in verify(root.url) for problem in found.problems]
    assert problems
    found = refusals(root, head)
    assert len(found) >= 2, found  # a window of rows alone can't compare digests of tables
    assert any(re.search(words, text) for text in [*found, *problems]), [*found, *problems]


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_chains_are_refused(name: str) -> None:
    assert_refused(GOLDEN, *CHANGES[name])


def test_a_broken_link_leaves_the_chain_before() -> None:
    root, chain = new_root(), load(Folder(GOLDEN))
    in_deltas(2, before="0" * 16)(chain)
    seal(root, chain)
    whole, problems = newest(root)
    assert whole is not None
    assert whole.head.id == chain[1].folder
    assert len(problems) == 3


def assert_found_by_digests(golden: Path, seed: int) -> None:
    """Change bytes of links and bases under valid checksums: nothing but an error of ours."""
    draw = random.Random(seed)
    root, chain = new_root(), load(Folder(golden))
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
        intact = Folder(golden)
        content = read_content(intact, resolve(intact, content.chain.head.id))
        wanted = TableReader(content, table, ChunkCache(intact)).window(0, ROWS)
        assert same_bits(found.weight, wanted.weight)  # padding was changed, or nothing


@pytest.mark.parametrize("seed", some_of(range(60), *range(0, 60, 8)))
def test_random_payloads_are_refused_or_have_another_digest(seed: int) -> None:
    assert_found_by_digests(GOLDEN, seed)
