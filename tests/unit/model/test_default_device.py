"""Save and restore under ``torch.set_default_device``, which is meant for the user's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash.save_sweep import SPEC, alone
from tests.distributed import references
from tests.distributed.models import Job, uniform_plan
from tests.distributed.states import gather, scramble
from tests.examples import some_of
from torchrec_checknrun import Checkpointer, Consecutive, Quantization

PLAN = uniform_plan(SPEC, "table_wise", 1)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with alone():
        yield


@contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def checkpointer(root: Path, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    return Checkpointer(
        root, model=job.model, state=state, policy=Consecutive(), chunk_bytes=1000, **options
    )


def rank_files(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(root.glob("seq*/rank-*.bin"))]


def restored(root: Path, device: str | None) -> dict[str, Any]:
    """Restore into a model that has taken no step yet."""
    job = Job.build(SPEC, PLAN, seed=7)
    scramble(job)
    with default_device(device), checkpointer(root, job) as saver:
        assert saver.restore() is not None
    return gather(job)


QUANTIZATIONS = [
    Quantization(),
    *(Quantization(bits, optimizer="log8", compress=True) for bits in (2, 3, 4, 8)),
    *(Quantization(4, method) for method in ("asymmetric", "symmetric", "greedy", "kmeans")),
    *(Quantization(method=method) for method in ("fp16", "bf16", "importance")),
]


@pytest.mark.parametrize(
    "staging", ["auto", *(pytest.param(how, marks=pytest.mark.slow) for how in ("copy", "encode"))]
)
@pytest.mark.parametrize(
    "quantization", some_of(QUANTIZATIONS, 0, 3, 11), ids=lambda q: f"{q.method}{q.bits or ''}"
)
def test_the_default_device_changes_no_byte(
    tmp_path: Path, quantization: Quantization, staging: str
) -> None:
    quantization = replace(quantization, exact_below_rows=0)
    job = Job.build(SPEC, PLAN)
    savers: dict[str | None, Checkpointer] = {}
    for device in (None, "meta"):
        with default_device(device):
            savers[device] = checkpointer(
                tmp_path / str(device), job, quantization=quantization, staging=staging
            )
    for _ in range(3):
        job.train(2)
        for device, saver in savers.items():
            saver.steps += 1
            with default_device(device):
                assert saver.save() is not None
    wanted = gather(job)
    for device, saver in savers.items():
        with default_device(device):
            saver.close()
    files = [rank_files(tmp_path / str(device)) for device in savers]
    assert len(files[0]) == 3
    assert files[0] == files[1]
    found = [restored(tmp_path / "None", device) for device in savers]
    assert references.differences(found[1], found[0], None) == []
    if quantization.bits is None and quantization.method == "adaptive":
        assert references.differences(found[1], wanted, None) == []
