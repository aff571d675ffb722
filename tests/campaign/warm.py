"""Warm up every process of the campaign before forking."""

from __future__ import annotations

from tests.campaign.kill_plan import SPEC
from tests.distributed.models import Job, uniform_plan


def warm() -> None:
    """Build a model and look rows up: the first time takes ten times as long."""
    job = Job.build(SPEC, uniform_plan(SPEC, "row_wise", 1))
    job.loss(*job.batch(0))
    job.model.state_dict()
