"""An error of one rank outside the storage reaches every rank before the timeout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, save, where
from torchrec_checknrun import AtEnd
from torchrec_checknrun.errors import ModelPartlyRestored

TIMEOUT = 60.0


@contextmanager
def failing(owner: object, method: str, here: bool) -> Iterator[None]:
    """Let a method fail, on some ranks."""

    def fail(*_: object) -> None:
        raise MemoryError("of this rank")

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(owner, method, fail)
        yield


def told(error: type[Exception]) -> AbstractContextManager[Any]:
    return pytest.raises(error, match="of this rank")


def fail_everywhere(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job, last = build(spec, plan), dist.get_rank() == 1
    started = time.monotonic()
    with checkpointer(root, job, timeout_seconds=TIMEOUT) as saver:
        saver.steps = 1
        save(saver)
        # When everything is written, and the optimizers are told their progress:
        with failing(saver._target.tracked, "set_progress", last), told(ModelPartlyRestored):
            saver.restore()
        # What rank 0 writes to the root after that:
        with failing(saver._saver.writer, "restored", not last), told(MemoryError):
            saver.restore()
        saver.restore()
    saver = checkpointer(root, job, timeout_seconds=TIMEOUT, triggers=[AtEnd()])
    saver.step()
    with failing(saver._target.tracked, "refresh", last), told(MemoryError):
        saver.close()
    assert time.monotonic() - started < TIMEOUT


def test_errors_of_one_rank(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(fail_everywhere, **where(tmp_path))
