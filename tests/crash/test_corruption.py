"""Every damage is found and named, and a restore gives the newest whole chain."""

from __future__ import annotations

from pathlib import Path

from tests.crash.corruption import CorruptionSweep
from tests.crash.save_sweep import alone


def test_every_file_in_every_way(tmp_path: Path) -> None:
    with alone():
        sweep = CorruptionSweep(tmp_path)
        damages = list(sweep.damages())
        found = sweep.run(iter(damages))
    assert not found.lost
    assert found.named == found.tried == len(damages)
    assert min(found.kinds.values()) >= 3
    assert 0 < found.restored_older < found.tried
