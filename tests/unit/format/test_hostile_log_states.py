"""Refuse hostile optimizer state stored as logarithmic differences: checksums are valid."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some_of
from tests.golden.make_deltas import DTYPES, ROWS
from tests.unit.chains import new_root, same_bits
from tests.unit.forgery import Forged, load, seal
from tests.unit.format.test_hostile_deltas import Change, assert_refused, rows_of
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.restore.chunks import read_content
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.links import build_table
from torchrec_checknrun.tools.tables import ChunkCache, TableReader

pytestmark = pytest.mark.usefixtures("small_operations")

GOLDEN = Path(__file__).parents[2] / "golden" / "logdelta"


def state_of(forged: Forged, table: str = "bf16") -> dict[str, Any]:
    found: dict[str, Any] = rows_of(forged, table)["optimizer"][0]
    return found


def in_state(age: int, **fields: Any) -> Change:
    return lambda chain: state_of(chain[age]).update(fields)


def in_encoding(age: int, **fields: Any) -> Change:
    return lambda chain: state_of(chain[age])["encoding"].update(fields)


def without_link(chain: list[Forged]) -> None:
    del state_of(chain[2])["encoding"]["link"]


def of_plain_rows(chain: list[Forged]) -> None:
    """Give rows that nothing builds on such state."""
    entry = rows_of(chain[1], "fisher")
    entry["optimizer"][0]["encoding"] = {"scheme": "logdelta"}


def another_code(chain: list[Forged]) -> None:
    """Move one row's sum by a level; weights and everything else agree."""
    entry = rows_of(chain[2])
    file = next(f for f in chain[2].files.values() if entry in f.index["chunks"])
    assert "raw" not in entry["optimizer"][0]
    start = entry["offset"] + entry["ids"]["bytes"] + entry["weight"]["bytes"]
    assert file.payload[start + 1] == entry["count"]  # as it is: too short for zstd
    symbols = file.payload[start + 2 : start + 2 + entry["count"]]
    near = next(at for at, symbol in enumerate(symbols) if symbol < 127)
    file.payload[start + 2 + near] += 1


CHANGES: dict[str, tuple[str, Change]] = {
    "a base with links": ("stand alone", in_encoding(0, link=True)),
    "a link that says it is none": ("without predecessors", without_link),
    "a link that is none": ("are not of", in_encoding(2, link=False)),
    "an unknown parameter": ("are not of", in_encoding(2, low=1.0)),
    "another dtype": ("float16 is stored by", in_state(2, dtype="float16")),
    "one for each weight": ("is stored by", in_state(2, rowwise=False)),
    "exact in between": ("before it was|take", in_state(2, encoding={"scheme": "fp32"})),
    "of rows that nothing builds on": ("of codec 'fisher'", of_plain_rows),
    "another sum": ("digest", another_code),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_states_are_refused(name: str) -> None:
    assert_refused(GOLDEN, *CHANGES[name])


@pytest.mark.parametrize("seed", some_of(range(60), *range(0, 60, 6)))
def test_random_states_are_refused_or_have_another_digest(seed: int) -> None:
    draw = random.Random(seed)
    root, chain = new_root(), load(Folder(GOLDEN))
    forged, table = draw.choice(chain), draw.choice(list(DTYPES))
    entry = rows_of(forged, table)
    file = next(f for f in forged.files.values() if entry in f.index["chunks"])
    start = entry["offset"] + entry["ids"]["bytes"] + entry["weight"]["bytes"]
    for _ in range(draw.randint(1, 3)):
        at = start + draw.randrange(entry["optimizer"][0]["bytes"])
        file.payload[at] = draw.randrange(256)
    content = read_content(root, resolve(root, seal(root, chain)))
    with suppress(CorruptCheckpoint):
        build_table(root, content, table)  # which compares digests
        found = TableReader(content, table, ChunkCache(root)).window(0, ROWS)
        intact = Folder(GOLDEN)
        content = read_content(intact, resolve(intact, content.chain.head.id))
        wanted = TableReader(content, table, ChunkCache(intact)).window(0, ROWS)
        assert same_bits(found.weight, wanted.weight)
        assert same_bits(found.optimizer["momentum1"], wanted.optimizer["momentum1"])
