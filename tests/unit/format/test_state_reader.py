"""Read optimizer state stored by ``logdelta`` by docs/reference/read_states.py, and its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.make_deltas import DIM, SPLIT
from tests.unit.delta.test_log_levels import PLAIN
from tests.unit.format.test_delta_reader import DOCS, decompress
from tests.unit.run.deltas import chain, delta, make_job
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.delta import log_levels

pytestmark = pytest.mark.usefixtures("one_rank")

GOLDEN = Path(__file__).parents[2] / "golden" / "logdelta"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    import read_states  # type: ignore[import-not-found]  # of the pages, not of the package

    return read_states


@pytest.mark.parametrize("compress", [False, True], ids=["", "zstd"])
def test_the_reader_reads_what_a_restore_gives(tmp_path: Path, reader: Any, compress: bool) -> None:
    chosen = delta(compress=compress, optimizer="logdelta")
    made = chain(tmp_path, make_job(), 6, quantization=chosen)
    report = compact(tmp_path, made[4][0])
    assert report is not None
    for name, wanted in [*made, (report.id, made[4][1])]:
        states = {n: v for n, v in wanted.items() if n.endswith("/momentum1")}
        assert len(states) == 2
        for shard, values in states.items():
            table = shard.split("[")[0]
            (found,) = reader.read_states(tmp_path, name, table, "momentum1", decompress).values()
            assert found.tobytes() == values.tobytes(), (name, table)


def test_the_reader_reads_golden_checkpoints(reader: Any) -> None:
    """With rows without a sum, of several columns, split over files."""
    head = sorted(path.name for path in GOLDEN.glob("seq-*"))[-1]
    with np.load(GOLDEN / "expected.npz") as expected:
        for table in ("fp32", "bf16", "fp16"):
            found = reader.read_states(GOLDEN, head, table, "momentum1", decompress)
            assert [*found] == SPLIT.get(table, [(0, DIM)])
            for (first, _), values in found.items():
                assert values.tobytes() == expected[f"{table}.{first}.momentum1"].tobytes()


def test_its_levels_are_ours(reader: Any) -> None:
    found = reader._levels()
    assert found.tobytes() == log_levels.levels().tobytes()
    assert found[: len(PLAIN)].tolist() == PLAIN
