"""A restore finds once that the full checkpoint of many is damaged, and goes further back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import references
from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.distributed.states import gather
from tests.unit.run.jobs import checkpointer, train
from torchrec_checknrun import Consecutive, OneShot
from torchrec_checknrun.policy import Decision, Policy
from torchrec_checknrun.restore import restore

MANY = 12
SPEC = ModelSpec((CollectionSpec("c", (TableSpec("t", 5000, 8, ("f0",)),)),))

pytestmark = pytest.mark.usefixtures("one_rank")


class FullTwice:
    """A policy that saves two full checkpoints, and then what another one says."""

    def __init__(self, then: Policy) -> None:
        self._then = then
        self._full = 1

    def decide(self, history: Any) -> Decision:
        if self._full:
            self._full = 0
            return Decision.FULL
        return self._then.decide(history)


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_what_builds_on_a_damaged_one_is_not_read(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, each up to the damage, were terabytes times hundreds."""
    job = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1))
    with checkpointer(tmp_path, job, policy=FullTwice(policy)) as saver:
        saver.restore()
        train(job, saver)
        first = saver.save()
        wanted = gather(job)
        train(job, saver)
        second = saver.save()
        assert second.kind == "full"
        for _ in range(MANY):
            train(job, saver)
            assert saver.save().kind == "differential"
    file = tmp_path / second.id / "rank-00000.bin"
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1  # in a chunk of rows
    file.write_bytes(content)
    reads, read_chunks = 0, restore.read_content

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return read_chunks(*arguments, **options)

    monkeypatch.setattr(restore, "read_content", counted)
    other = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1), seed=3)
    with checkpointer(tmp_path, other) as saver:
        report = saver.restore()
        assert reads == 2
        assert report is not None
        assert report.id == first.id
        assert len(report.passed_over) == MANY  # the damaged one is named by these
        assert all(second.id in problem for problem in report.passed_over)
        assert references.differences(gather(other), wanted, None) == []
