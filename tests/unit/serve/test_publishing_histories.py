"""Whatever a run goes through, a follower of its publications serves exactly what was published."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.chains import one_thread
from tests.unit.serve.served import Net, differences, quantized
from tests.unit.serve.test_publishing import plain, publisher, publishing
from torchrec_checknrun import Follower
from torchrec_checknrun.errors import StorageFailed

pytestmark = pytest.mark.usefixtures("one_rank")
EVENTS = ["train", "publish", "publish", "fail", "save", "restore", "touch", "follow", "restart"]


def fail(*arguments: Any) -> None:
    raise StorageFailed(5, "gone")


@settings(
    max_examples=examples(200, quick=5), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=4, max_size=20),
    staging=st.sampled_from(["copy_on_write", "copy", "encode"]),
)
def test_any_history(events: list[str], staging: str) -> None:
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        roots = Path(folder) / "run", Path(folder) / "serve"
        job = publishing(roots, staging=staging, publish={"keep": 1})
        follower = Follower(roots[1], quantized(Net(), 4))
        job.train(0)
        job.save()
        published: dict[int, Any] = {}
        for seed, event in enumerate([*events, "publish", "follow"]):
            if event == "train":
                job.train(seed)
            elif event == "save":
                job.save()
            elif event == "restore":
                job.saver.restore()
            elif event == "restart":
                job.saver.close()
                job = publishing(roots, staging=staging, publish={"keep": 1})
                job.saver.restore()
            elif event == "touch":  # by hand, which the package notices
                weight = job.saver._target.tracked.shards[0].local.weight
                with job.saver.writing(job.saver._target.tracked.shards[0].table, [seed]):
                    weight[seed] += 1
            elif event == "fail":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(publisher(job)._writer, "before_commit", fail)
                    assert job.saver.publish() is None
            elif event == "publish":
                report = job.saver.publish()
                assert report is not None
                published[report.sequence] = quantized(plain(job), 4)
            elif published:
                version = follower.poll()
                assert version is not None
                assert version.error is None
                assert version.sequence == max(published)
                assert differences(follower, published[version.sequence]) == []
        job.saver.close()
