"""One rank gives its image up: no other rank waits for it, and all restore from the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Workers, build, checkpointer, where
from torchrec_checknrun import Images


def give_up_one(root: str, spec: dict[str, Any], plan: Plan) -> None:
    job = build(spec, plan)
    memory = Path(root).parent
    with checkpointer(root, job, timeout_seconds=20.0, survive=Images(str(memory))) as saver:
        saver.restore()
        job.train()
        saver.step()
        saver.save()
        image = saver._survival._image
        assert image is not None
        if dist.get_rank() == 1:
            image.give_up("says the test")
        job.train()
        saver.step()
        report = saver.restore()
        assert report is not None
        assert report.source == "checkpoint"
        for _ in range(3):
            job.train()
            saver.step()
        assert saver.save().step == 4


def test_one_rank_gives_its_image_up(workers: Workers, tmp_path: Path) -> None:
    workers(2).run(give_up_one, **where(tmp_path))
