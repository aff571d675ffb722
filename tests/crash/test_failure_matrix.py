"""A failure in any phase on any rank: all are told the same, in time, and no row is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.failure_matrix import PHASES, cases, fail_everywhere, judge
from tests.distributed.worker_pool import WorkerPool

Workers = Callable[[int], WorkerPool]


def check(workers: Workers, folder: Path, every_kind: bool) -> None:
    chosen = cases(every_kind)
    assert {phase for phase, _, _ in chosen} == PHASES.keys()
    answers = workers(2).run(fail_everywhere, timeout=240.0, root=str(folder), chosen=chosen)
    tally = judge(answers, chosen)
    assert not tally.lost
    assert tally.injected == len(chosen)


def test_every_phase_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    check(workers, tmp_path, every_kind=False)


@pytest.mark.slow
def test_every_phase_on_every_rank_with_every_kind_of_error(
    workers: Workers, tmp_path: Path
) -> None:
    check(workers, tmp_path, every_kind=True)
