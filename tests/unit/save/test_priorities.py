"""Come after training where cores are short: threads that encode and write."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.save_sweep import SPEC, alone
from tests.distributed.models import Job, uniform_plan
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.native import has_extension
from torchrec_checknrun.save.commit import CheckpointWriter
from torchrec_checknrun.save.local_part import LocalPart
from torchrec_checknrun.snapshot.cut_rows import CutRows
from torchrec_checknrun.snapshot.staged import StagedJob
from torchrec_checknrun.store.behind import WriteBehind
from torchrec_checknrun.threads import BEHIND_TRAINING

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no priorities of threads")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Seen:
    """The niceness at which functions are called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.levels: dict[str, list[int]] = defaultdict(list)

    def watch(self, owner: Any, name: str) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            self.levels[name].append(niceness())
            return own(*arguments, **options)

        self._patch.setattr(owner, name, noted)


def test_training_comes_before_what_encodes_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of the second or third save inherits the level of the save before."""
    if not has_extension():
        pytest.skip("the compiled extension was not built: rows are copied at the cut")
    seen, own = Seen(monkeypatch), niceness()
    for owner, name in (
        (StagedJob, "encode"),
        (WriteBehind, "_write"),
        (CheckpointWriter, "commit"),
        (CutRows, "finish"),
        (LocalPart, "prepare"),
    ):
        seen.watch(owner, name)
    with alone():
        job = Job.build(SPEC, uniform_plan(SPEC, "table_wise", 1))
        state = {"optimizer": job.optimizer, "job": job}
        with Checkpointer(tmp_path / "root", model=job.model, state=state) as saver:
            for _ in range(3):
                job.train(4)
                saver.save()
    behind = min(19, own + BEHIND_TRAINING)
    assert {name: set(levels) for name, levels in seen.levels.items()} == {
        "prepare": {own},
        "finish": {own},
        "encode": {behind},
        "_write": {behind},
        "commit": {behind},
    }
    assert niceness() == own
