"""Save and restore what loops of their own keep: windows, dates, text."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.models import Job
from tests.unit.run.jobs import make_job
from torchrec_checknrun import Checkpointer, Images
from torchrec_checknrun.root.chain import resolve
from torchrec_checknrun.shared_memory import file as files
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.export import VALUES_NAME, export_safetensors
from torchrec_checknrun.tools.verify import verify

pytestmark = pytest.mark.usefixtures("one_rank")


class Progress:
    """A loop's own state beside the model."""

    def __init__(self) -> None:
        self.losses: deque[Any] = deque(maxlen=3)
        self.kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, **self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)
        self.losses = self.kept.pop("losses")


def kept() -> dict[str, Any]:
    return {
        "begun": datetime(2026, 11, 28, 17, 30, 1, 5, tzinfo=timezone(timedelta(hours=1))),
        "day": date(2026, 11, 28),
        "took": timedelta(hours=30, microseconds=7),
        "files": np.array(["day_0", "day_11"]),
        "seen": np.array(["2026-11-01", "NaT"], "M8[D]"),
        "device": torch.device("cpu"),
        "by_pair": {(0, "a"): 1.5, (1, None): torch.Size([2]), 0.5: {True: "x", None: []}},
        "recent": deque([("a", 1), {"b": deque([torch.ones(2)])}]),
        "counts": {"cat_0": Counter(a=2), "all": [defaultdict(int, {3: 1}), OrderedDict(b=1, a=2)]},
    }


def begin(folder: Path, progress: Progress, survive: bool) -> tuple[Job, Checkpointer]:
    """Make a job and its Checkpointer, in what passes for a new process."""
    files._mapped.clear()
    (folder / "memory").mkdir(exist_ok=True)
    job = make_job(seed=0)
    images = Images(folder=str(folder / "memory")) if survive else None
    state = {"optimizer": job.optimizer, "job": job, "progress": progress}
    return job, Checkpointer(folder / "root", model=job.model, state=state, survive=images)


def die(saver: Checkpointer) -> None:
    """End as a killed process does: nothing is closed or saved."""
    saver._saver.settle(wait=True)
    saver._release(failed=True)


@pytest.mark.parametrize("survive", [True, False], ids=["images", "storage"])
def test_all_of_it_comes_back(tmp_path: Path, survive: bool) -> None:
    progress, other = Progress(), Progress()
    job, saver = begin(tmp_path, progress, survive)
    saver.restore()
    for step in range(5):
        job.train(1)
        progress.losses.append(torch.tensor(float(step)))
        progress.kept = kept()
        saver.step()
    if not survive:
        saver.save()
    die(saver)
    _, saver = begin(tmp_path, other, survive)
    report = saver.restore()
    die(saver)
    assert report is not None
    assert report.source == ("images" if survive else "checkpoint")
    assert (other.losses.maxlen, [float(loss) for loss in other.losses]) == (3, [2.0, 3.0, 4.0])
    found, wanted = other.kept, kept()
    for name in ("files", "seen"):
        one, two = found.pop(name), wanted.pop(name)
        assert (one.dtype, one.tolist()) == (two.dtype, two.tolist())
    assert {name: str(value) for name, value in found.items()} == {
        name: str(value) for name, value in wanted.items()
    }


def test_other_programs_read_it(tmp_path: Path) -> None:
    progress = Progress()
    progress.kept = kept()
    progress.losses.append(0.5)
    _, saver = begin(tmp_path, progress, survive=False)
    saver.save()
    die(saver)
    root = Folder(tmp_path / "root")
    assert not any(checked.problems for checked in verify(root))
    (name,) = (path.name for path in (tmp_path / "root").glob("seq-*"))
    export_safetensors(root, resolve(root, name), tmp_path / "out")
    values = json.loads((tmp_path / "out" / VALUES_NAME).read_text())["values"]
    assert values["progress.losses.0"] == 0.5
    assert values["progress.day"] == {"date": "2026-11-28"}
    assert values["progress.files"] == ["day_0", "day_11"]
    assert values["progress.by_pair.(0, 'a')"] == 1.5
