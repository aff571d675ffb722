"""Read tables stored as differences by docs/reference/read_deltas.py, and digests by format.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.unit.run.deltas import Tables, chain, delta, make_job
from torchrec_checknrun.compaction.compact import compact

pytestmark = pytest.mark.usefixtures("one_rank")

DOCS = Path(__file__).parents[3] / "docs" / "reference"
WORD = 1 << 64
Read = Callable[..., np.ndarray]


@pytest.fixture
def read_deltas(monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.syspath_prepend(str(DOCS))
    import read_deltas  # type: ignore[import-not-found]  # of the pages, not of the package

    found: Read = read_deltas.read_deltas
    return found


def decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def weights(of: Tables) -> dict[str, np.ndarray]:
    return {name.split("[")[0]: value for name, value in of.items() if "/" not in name}


@pytest.mark.parametrize("compress", [False, True], ids=["", "zstd"])
def test_the_reader_reads_what_a_restore_gives(
    tmp_path: Path, read_deltas: Read, compress: bool
) -> None:
    made = chain(tmp_path, make_job(), 6, quantization=delta(compress=compress))
    report = compact(tmp_path, made[4][0])
    assert report is not None
    for name, wanted in [*made, (report.id, made[4][1])]:
        for table, values in weights(wanted).items():
            found = read_deltas(tmp_path, name, table, decompress)
            assert found.tobytes() == values.tobytes(), (name, table)


def test_digests_are_those_of_the_page(tmp_path: Path, read_deltas: Read) -> None:
    """Compute a table's digest from the reader's integers, in plain Python."""
    made = chain(tmp_path, make_job(), 3)
    module: Any = sys.modules["read_deltas"]
    held: dict[str, Any] = {}
    add = module._add

    def watched(entry: Any, data: Any, dim: int, known: Any, decompress: Any) -> None:
        add(entry, data, dim, known, decompress)
        held[entry["table"]] = known

    module._add = watched
    try:
        for name, _ in made:
            manifest = json.loads((tmp_path / name / "manifest.json").read_bytes())["manifest"]
            for table, said in manifest["deltas"].items():
                read_deltas(tmp_path, name, table, decompress)
                exponents, codes, exact = held[table]
                digest = sum(
                    row_digest(
                        id, (0, codes.shape[1]), 2 if exact[id] else 1, int(exponents[id]), row
                    )
                    for id, row in enumerate(codes.tolist())
                )
                assert f"{digest % WORD:016x}" == said["after"], (name, table)
    finally:
        module._add = add


def row_digest(
    id: int, columns: tuple[int, int], kind: int, exponent: int, codes: list[int]
) -> int:
    q = mix(id ^ mix(columns[0])) ^ (mix(columns[1]) << 1) % WORD
    p = mix(q ^ kind << 32 ^ exponent + 1024)
    return mix((p + sum((c % (1 << 32)) * (mix(j) | 1) for j, c in enumerate(codes))) % WORD)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31
