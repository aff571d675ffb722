"""Run jobs whose checkpoints are written in the background, on a store that waits or fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

from tests.distributed import references
from tests.distributed.models import (
    CollectionSpec,
    Job,
    ModelSpec,
    Plan,
    TableSpec,
    uniform_plan,
)
from tests.distributed.states import gather, scramble
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.format.names import MANIFEST_NAME
from torchrec_checknrun.store.folder import Folder

TABLES = (TableSpec("t0", 400, 8, ("f0", "f1")), TableSpec("t1", 300, 12, ("f1",)))
SPEC = ModelSpec((CollectionSpec("a", TABLES), CollectionSpec("b", TABLES[:1])))


def where(tmp_path: Path, ranks: int = 2) -> dict[str, Any]:
    plan = uniform_plan(SPEC, "row_wise", ranks)
    return {"root": str(tmp_path / "root"), "plan": plan}


def build(plan: Plan) -> Job:
    return Job.build(SPEC, plan, seed=0)


def checkpointer(root: str, job: Job, **options: Any) -> Checkpointer:
    state = {"optimizer": job.optimizer, "job": job}
    options.setdefault("chunk_bytes", 3000)
    options.setdefault("policy", Consecutive())
    options.setdefault("retention", None)
    return Checkpointer(root, model=job.model, state=state, **options)


@contextmanager
def storage_waits() -> Iterator[Event]:
    """Hold back every manifest until the event is set."""
    go, put = Event(), Folder.put

    def wait_and_put(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
        assert name != MANIFEST_NAME or go.wait(60)
        put(folder, name, data, new)

    with mock.patch.object(Folder, "put", wait_and_put):
        yield go


@contextmanager
def storage_fails(when: str) -> Iterator[list[str]]:
    """Fail every put of a manifest, ``before`` or ``after`` it is stored; list the checkpoints."""
    put: Any = Folder.put
    hit: list[str] = []

    def put_or_fail(folder: Folder, name: str, data: bytes, new: bool = False) -> None:
        if name != MANIFEST_NAME:
            put(folder, name, data, new)
            return
        hit.append(folder.name)
        if when == "after":
            put(folder, name, data, new)
        raise OSError(28, "no space left, says the test")

    with mock.patch.object(Folder, "put", put_or_fail):
        yield hit


def ids(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob(f"*/{MANIFEST_NAME}"))


def parent_of(root: str, name: str) -> str | None:
    manifest = json.loads(Path(root, name, MANIFEST_NAME).read_bytes())["manifest"]
    return manifest["parent"] and str(manifest["parent"]["id"])


def differences(saver: Checkpointer, job: Job, wanted: dict[str, Any], **options: Any) -> list[str]:
    """Restore the newest checkpoint over noise; return how the job differs from ``wanted``."""
    scramble(job)
    assert saver.restore(**options) is not None
    return references.differences(gather(job), wanted, None)
