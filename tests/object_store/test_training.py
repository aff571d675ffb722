"""Train a sharded model that keeps its checkpoints in S3."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.distributed.background_jobs import where
from tests.distributed.test_one_writer import Workers, on_s3
from tests.object_store.server import KEY, SECRET, Server


def test_two_ranks(workers: Workers, server: Server, bucket: str, tmp_path: Path) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
    }
    case = {**where(tmp_path), "root": f"{bucket}/{uuid.uuid4().hex}"}
    zero, one = workers(2).run(on_s3, **case, environment=environment)
    # The resumed chain of three is in use; the full checkpoint is the fourth.
    assert zero == one == [[], 3, 4]
