"""Read tables stored by ``lc`` with docs/reference/read_lc.py, which shares no code with ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.make_deltas import DTYPES
from tests.unit.format.test_delta_reader import DOCS, decompress, weights
from tests.unit.run.deltas import chain, lc, make_job
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")

GOLDEN = Path(__file__).parents[2] / "golden" / "lc"
Read = Callable[..., np.ndarray]


@pytest.fixture
def read_lc(monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.syspath_prepend(str(DOCS))
    import read_lc  # type: ignore[import-not-found]  # of the pages, not of the package

    found: Read = read_lc.read_lc
    return found


@pytest.mark.parametrize("compress", [False, True], ids=["", "zstd"])
def test_the_reader_reads_what_a_restore_gives(
    tmp_path: Path, read_lc: Read, compress: bool
) -> None:
    made = chain(tmp_path, make_job(), 4, quantization=lc(2, compress=compress))
    report = compact(tmp_path, made[2][0])
    assert report is not None
    for name, wanted in [*made, (report.id, made[2][1])]:
        for table, values in weights(wanted).items():
            found = read_lc(tmp_path, name, table, decompress)
            assert found.tobytes() == values.tobytes(), (name, table)


def test_the_reader_reads_the_golden_ones(read_lc: Read) -> None:
    """Read narrow types, columns apart, and rows that are not finite."""
    newest = committed(Folder(GOLDEN))[0]
    with np.load(GOLDEN / "expected.npz") as expected:
        for table, dtype in DTYPES.items():
            found = torch.from_numpy(read_lc(GOLDEN, newest, table, decompress)).to(dtype)
            keys = sorted((k for k in expected if k.startswith(f"{table}.") and k.count(".") == 1),
                          key=lambda key: int(key.split(".")[1]))  # fmt: skip
            parts = [torch.from_numpy(expected[key]).view(dtype) for key in keys]
            wanted = torch.cat(parts, dim=1)
            assert torch.equal(found.isnan(), wanted.isnan()), table
            assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()]), table


def test_the_page_names_the_reader() -> None:
    assert "read_lc.py" in (DOCS / "format.md").read_text()
    assert len((DOCS / "read_lc.py").read_text().splitlines()) <= 100
