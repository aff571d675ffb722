"""Kill ranks in the middle of partial recoveries: they are repeated, and nothing is counted twice.

All points are ``python -m tests.crash.images.partial --json FILE``; this is a slice of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.forked import Forked


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("every", "points"),
    [(19, 3), pytest.param(4, 14, marks=pytest.mark.slow)],
    ids=["some points", "more points"],
)
def test_a_killed_partial_recovery_is_repeated(tmp_path: Path, every: int, points: int) -> None:
    file, log = tmp_path / "partial.json", tmp_path / "log"
    words = ("--json", str(file), "--every", str(every))
    Forked("tests.crash.images.partial", *words, log=log).wait(560)
    assert file.exists(), log.read_text()[-6000:]
    found = json.loads(file.read_text())
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["kills"] >= points
    assert found["counts"]["runs compared"] == points + 2  # two references, too
