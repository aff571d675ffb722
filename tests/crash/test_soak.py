"""A short soak; `make soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

from tests.crash.save_sweep import alone
from tests.crash.soak import Soak
from tests.distributed.slowed import slowed


def test_twenty_checkpoints(tmp_path: Path) -> None:
    with alone(), slowed():  # training overwrites rows that are still to be copied
        result = Soak(tmp_path, seed=2).run(20)
    assert result["lost"] == []
    assert result["faults"] > 0
    assert result["protected"] > 0
    assert result["committed"] + result["errors"] == 20
    assert result["samples"][-1]["files"] < 60
