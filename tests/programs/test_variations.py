"""What teams change in a training program comes back as well, to the last attribute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.worker_pool import WorkerPool
from tests.programs.resuming import compare, compare_bytes, killed_and_resumed
from tests.programs.variations import VARIATIONS


@pytest.mark.parametrize("variation", sorted(VARIATIONS))
def test_killed_and_resumed(ranks: WorkerPool, tmp_path: Path, variation: str) -> None:
    resumed, wanted = killed_and_resumed(ranks, tmp_path, "variations", variation=variation)
    compare(resumed, wanted)
    compare_bytes(resumed, wanted)
