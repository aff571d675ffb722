"""Go back to the last step where a kernel changes rows in its forward pass, as moving averages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.states import gather
from tests.distributed.zoo import EMA, Zoo, build_zoo
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.shared_memory import file as files

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not has_extension(), reason="the extension was not built"),
]

PLAN = dict.fromkeys(("t0", "t1", "t2"), "table_wise:0")
AVERAGED_IN = EMA["emainplace_mode"].step_ema
"""The step whose forward pass moves all rows."""


def saver_of(zoo: Zoo, folder: Path) -> Checkpointer:
    files._mapped.clear()
    images = Images(folder=str(folder / "memory"))
    state = {"optimizer": zoo.optimizer}
    return Checkpointer(folder / "root", model=zoo.model, state=state, survive=images)


@pytest.mark.parametrize("backward", [False, True])
def test_averages_of_a_torn_step_are_undone(tmp_path: Path, backward: bool) -> None:
    (tmp_path / "memory").mkdir()
    zoo = build_zoo("bags", PLAN, fused="ema")
    saver = saver_of(zoo, tmp_path)
    assert saver.restore() is None
    for _ in range(AVERAGED_IN - 1):
        zoo.train()
        saver.step()
    wanted = gather(zoo)
    loss, _ = zoo.model(zoo.batch())
    if backward:
        loss.backward()
    assert any(gather(zoo)[name].tobytes() != wanted[name].tobytes() for name in wanted)
    saver._release(failed=True)
    again = build_zoo("bags", PLAN, fused="ema")
    with saver_of(again, tmp_path) as saver:
        report = saver.restore()
        assert report is not None
        assert (report.source, report.step) == ("images", AVERAGED_IN - 1), report.without_images
        found = gather(again)
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []
