"""A second run in a live run's root, started by mistake, leaves all of that run's alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from tests.distributed.partial_lives import Lives
from tests.distributed.test_priority_saves import restored, saves, settled, train
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import PrioritySaves
from torchrec_checknrun.errors import RootInUse
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.writers.lease import Holder

pytestmark = pytest.mark.skipif(not has_extension(), reason="the extension was not built")

Workers = Callable[[int], WorkerPool]


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="checknrun-test-", dir="/dev/shm") as memory:
        yield {"folder": str(tmp_path), "memory": memory}


def elsewhere() -> Any:
    """Make this process look like one of another machine."""
    other = msgspec.structs.replace(
        Holder.this_process(), machine="another", host="far", pid=7, run="another"
    )
    return mock.patch.object(Holder, "this_process", classmethod(lambda cls: other))


def second_run(folder: str, memory: str) -> list[Any]:
    """Return what is there of the live run's priority saves as another one comes and goes."""
    wanted = PrioritySaves(1, 1.0)
    live = Lives(folder, memory, priority=wanted)
    live.begin()
    live.saver.restore()
    train(live, 6)
    found = [saves(live)]
    second = Lives(folder, f"{memory}/another", priority=wanted)
    if dist.get_rank() == 0:
        Path(second.memory).mkdir()
    dist.barrier()
    for steps in (True, False):
        with elsewhere():
            second.begin()
            assert restored(second).step == 4
            settled(second)
            found.append(saves(live))
            if steps:
                second.job.train()
                with pytest.raises(RootInUse):
                    second.saver.step()
                second.job.train()
                second.saver.step()  # and goes on after the refusal
                settled(second)
                second.die([0, 1])
            else:  # an evaluation
                second.end()
        dist.barrier()
        found.append(saves(live))
    train(live, 1)
    live.die([1])
    live.begin()
    assert [rank.step for rank in restored(live).ranks] == [7, 4]
    live.end()
    return found


def test_priority_saves_of_a_live_run_stay(where: dict[str, Any], workers: Workers) -> None:
    for found in workers(2).run(second_run, **where):
        assert [name.rpartition(".")[2] for name in found[0]] == ["step-00000005", "step-00000006"]
        assert all(names == found[0] for names in found), found
