"""Average tables among replicas (two-dimensional parallelism), whose writes no counter shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.model_parallel import DMPCollection

from tests.unit.tracked_model import ROWS, make_model
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.snapshot.cut_rows import CopyOnWriteMemory, CutRows
from torchrec_checknrun.snapshot.snapshot import take_rows
from torchrec_checknrun.tracking import TrackedModel, track


class Replicas(DMPCollection):
    """Stands for the collection, which needs four ranks and a device with averages."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._dmp_wrapped_module = model
        self.before_sync: list[Any] = []

    def sync(self, include_optimizer_state: bool = True) -> None:
        for act in self.before_sync:
            act()
        for parameter in self._dmp_wrapped_module.parameters():
            for shard in getattr(parameter, "local_shards", list)():
                shard.tensor.data.add_(1)


@pytest.fixture
def replicas(group: None) -> Iterator[tuple[Replicas, TrackedModel]]:
    model = Replicas(make_model())
    tracked = track(model)
    yield model, tracked
    tracked.close()


def test_all_rows_count_as_modified(replicas: tuple[Replicas, TrackedModel]) -> None:
    model, tracked = replicas
    tracked.clear()
    model.sync()
    for ids in tracked.modified_rows().values():
        assert ids.tolist() == list(range(ROWS))
    tracked.close()
    tracked.clear()
    model.sync()
    assert not any(map(len, tracked.modified_rows().values()))


def test_the_rows_of_a_checkpoint_in_progress_are_waited_for(
    replicas: tuple[Replicas, TrackedModel],
) -> None:
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    model, tracked = replicas
    snapshots, _ = take_rows(tracked, None)
    rows = CutRows(CopyOnWriteMemory(1 << 20, tracked.shards), snapshots, wait_seconds=0.1)
    rows.protect()
    over: list[bool] = []
    model.before_sync.append(lambda: over.append(rows.copies.over))
    model.sync()
    assert over == [True]  # given up, since nobody has copied them
    assert rows.copies.failure is not None
    rows.close()
