"""Let a GPU fail while a checkpoint is saved: the save fails and says so, and nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fake_gpu import DEVICE, FakeGpu, gpu
from tests.unit.save.test_gpu_copies import Growing, Run
from torchrec_checknrun.errors import SaveFailed

pytestmark = pytest.mark.usefixtures("group")
__all__ = ["gpu"]


@pytest.mark.parametrize(
    ("where", "error"),
    [("broken", "unspecified launch failure"), ("refuses", "CUDA error: out of memory")],
    ids=["while the background waits", "at the cut"],
)
def test_an_error_fails_the_save(gpu: FakeGpu, tmp_path: Path, where: str, error: str) -> None:
    run = Run(tmp_path)
    setattr(gpu, where, RuntimeError(error))
    with pytest.raises(SaveFailed, match=error):
        run.saver.save()
    setattr(gpu, where, None)
    run.saver.save()
    run.saver.close()


def test_memory_is_released_though_the_gpu_has_failed(gpu: FakeGpu, tmp_path: Path) -> None:
    run = Run(tmp_path)
    gpu.broken = RuntimeError("CUDA error: unspecified launch failure")
    for _ in range(2):
        with pytest.raises(SaveFailed):
            run.saver.save()
    run.saver.close()
    assert gpu.pinned == {}


def test_no_page_locked_memory_at_the_start(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.no_pinned = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match=r"out of memory.*memory_budget"):
        Run(tmp_path)
    assert gpu.last_error is None


def test_no_page_locked_memory_later(gpu: FakeGpu, tmp_path: Path) -> None:
    state = Growing()
    run = Run(tmp_path, state={"growing": state}, memory_budget=64 << 20)
    run.saver.save()
    state.size = 4 << 20
    gpu.no_pinned = RuntimeError("CUDA error: out of memory")
    with pytest.raises(SaveFailed, match=r"out of memory.*memory_budget"):
        run.saver.save()
    assert gpu.last_error is None  # which training's next kernel would report
    gpu.no_pinned = None
    run.saver.save()
    run.saver.close()


def test_threads_wait_on_the_device_of_the_tables(gpu: FakeGpu, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver.save()
    run.saver.close()
    assert gpu.synchronized
    assert set(gpu.synchronized) == {DEVICE}
