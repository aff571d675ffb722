"""A rank that is waited for too long ends one save, and not all that follow."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, is_at, keep, save, where
from tests.distributed.states import scramble
from torchrec_checknrun import Checkpointer, Consecutive, Publish
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save.local_part import LocalPart

SECONDS = 0.4


def late(part: LocalPart, whole: Any = LocalPart.prepare) -> Any:
    time.sleep(3 * SECONDS)
    return whole(part)


def is_parted(saver: Checkpointer) -> bool:
    return saver._background_ranks.parted


def goes_on(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    rule = Publish(f"{root}-serve", every_seconds=1e6)
    with checkpointer(root, job, policy=Consecutive(), publish=rule) as saver:
        save(saver)
        ranks = saver._background_ranks
        for publishes in (False, True):
            ranks._timeout = timedelta(seconds=SECONDS)
            ranks.meet_again()
            ranks._timeout = timedelta(seconds=60)
            job.train()
            saver.step()
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1:
                    patch.setattr(LocalPart, "prepare", late)
                if publishes:
                    assert saver.publish() is None
                else:
                    with pytest.raises(SaveFailed, match="the ranks have lost each other"):
                        saver.save()
            dist.barrier()
            assert is_parted(saver)
            if publishes:
                assert saver.publish() is not None
            name = save(saver)
            assert not is_parted(saver)
            keep(job, root, name)
            scramble(job)
            report = saver.restore()
            assert report is not None
            assert report.id == name
            assert is_at(job, root, name)


def test_the_next_save_has_all_rows(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(goes_on, **where(tmp_path))
