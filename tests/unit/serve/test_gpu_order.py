"""On GPUs, what is launched runs later: predictions and writes of versions still don't meet.

A fake GPU holds back writes, or reads, until someone waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.serve.served import Job, Net, kernel_bytes, quantized, restored, served
from torchrec_checknrun import Follower
from torchrec_checknrun.serve.copies import OneCopy, TwoCopies
from torchrec_checknrun.serve.inference import gpus
from torchrec_checknrun.serve.inference.tables import Part

pytestmark = pytest.mark.usefixtures("one_rank")


class LateGpu:
    """Run what is launched only when someone waits.

    Args:
        writes: hold back rows that are written, too; otherwise these run at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
        self.queue: list[Callable[[], object]] = []
        here = torch.device("cuda", 0)
        monkeypatch.setattr("torch.cuda.synchronize", self.synchronize)
        monkeypatch.setattr(
            "torchrec_checknrun.serve.inference.replica.gpus_of", lambda _: frozenset([here])
        )
        for name in ("put", "copy_from") if writes else ():
            monkeypatch.setattr(Part, name, self._later(getattr(Part, name)))

    def _later(self, act: Callable[..., None]) -> Callable[..., None]:
        def launch(part: Part, *rest: Any) -> None:
            held = [each.clone() if isinstance(each, torch.Tensor) else each for each in rest]
            self.queue.append(lambda: act(part, *held))

        return launch

    def synchronize(self, gpu: torch.device) -> None:
        assert gpu == torch.device("cuda", 0)
        while self.queue:
            self.queue.pop(0)()


def bytes_of(model: Any) -> list[torch.Tensor]:
    return [memory.clone() for memory in kernel_bytes(model)]


def wanted(root: Path) -> list[torch.Tensor]:
    return kernel_bytes(quantized(restored(root), 8))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def at_once_shown(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something as soon as a version is shown, before the follower goes on."""
    for kind in (OneCopy, TwoCopies):
        show: Callable[..., None] = kind.show

        def show_and_act(*args: Any, show: Callable[..., None] = show) -> None:
            show(*args)
            act()

        monkeypatch.setattr(kind, "show", show_and_act)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_version_is_shown_once_its_rows_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    gpu = LateGpu(monkeypatch, writes=True)
    found: list[list[torch.Tensor]] = []

    def predict() -> None:
        with follower.read() as (model, _):
            found.append(bytes_of(model))

    at_once_shown(monkeypatch, predict)
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 8), copies=copies)
    for seed in range(3):
        job.train(seed)
        job.save()
        served(follower)
        assert same(found.pop(), wanted(tmp_path)), seed
    assert copies == 1 or gpu.queue, "the other copy catches up behind predictions"
    job.saver.close()


@pytest.mark.parametrize(("copies", "late"), [(1, False), (2, False), (2, True)])
def test_predictions_that_left_still_read_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, late: bool
) -> None:
    """Predict in a stream of its own, and leave before the prediction has run; with ``late`` once
    the next version is shown, which two copies let happen.
    """
    gpu = LateGpu(monkeypatch, writes=False)
    found: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    inside = ExitStack()
    if late:
        at_once_shown(monkeypatch, inside.close)
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 8), copies=copies)

    def launch(model: nn.Module, expected: list[torch.Tensor]) -> None:
        gpu.queue.append(lambda: found.append((bytes_of(model), expected)))

    job.train(0)
    job.save()
    served(follower)
    for seed in (1, 2, 3):
        model, _ = inside.enter_context(follower.read())
        inside.callback(launch, model, wanted(tmp_path))
        if not late:
            inside.close()
        job.train(seed)
        job.save()
        served(follower)
    assert len(found) == 3
    assert all(same(*each) for each in found)
    job.saver.close()


def test_the_copy_is_made_before_another_thread_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LateGpu(monkeypatch, writes=False)
    gpu.queue.append(lambda: None)
    Follower(tmp_path, quantized(Net(), 8))
    assert not gpu.queue


def test_a_gpu_that_fails_is_told_and_the_version_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = LateGpu(monkeypatch, writes=False)
    job = Job(tmp_path)
    follower = Follower(tmp_path, quantized(Net(), 8))
    job.train(0)
    job.save()
    first = served(follower)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.queue.append(fail)
    job.train(1)
    job.save()
    assert follower.look()
    assert "illegal memory access" in (follower.error or "")
    assert follower.version is not None
    assert follower.version.checkpoint_id == first.checkpoint_id
    assert not follower.look(), "the next look shows the version"
    with follower.read() as (model, _):
        assert same(kernel_bytes(model), wanted(tmp_path))
    job.saver.close()


def test_gpus_are_those_of_the_tensors() -> None:
    assert gpus.gpus_of([torch.zeros(2)]) == frozenset()
