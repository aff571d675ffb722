"""Compact a checkpoint in a process of its own, behind a training run.

The run starts this module by ``save.isolated_start``, and hears of the outcome through a pipe. The
process ends with the run, and leaves at most a directory without a manifest, which a pruning
deletes.
"""

from __future__ import annotations

import json
import os

import torch

from torchrec_checknrun.compaction.compact import compact_in
from torchrec_checknrun.store.folder import Folder

_NICENESS = 10
"""Training comes first."""


def main(descriptor: int, url: str, timeout_seconds: float, checkpoint: str) -> None:
    """Compact a checkpoint; write a line of JSON, the copy's ``id`` or the ``error``, to a pipe."""
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    answer: dict[str, str | None]
    try:
        report = compact_in(Folder(url, timeout_seconds), checkpoint)
        answer = {"id": None if report is None else report.id}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(descriptor, "w") as pipe:
        json.dump(answer, pipe)
