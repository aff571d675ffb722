"""Differential, quantized checkpoints for TorchRec, on torch.distributed.checkpoint.

Names are imported when they are first used: Hydra looks at this package in every app of an
environment that has it, and must not pay for torch and TorchRec there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchrec_checknrun.version import __version__

if TYPE_CHECKING:
    from torchrec_checknrun.codecs.quantization import Quantization, expected_restores
    from torchrec_checknrun.dcp import SavePlanner
    from torchrec_checknrun.model.marks import Consumer
    from torchrec_checknrun.model.tracked import TrackedModel, TrackedShard, track
    from torchrec_checknrun.restore.chunks import StorageReader
    from torchrec_checknrun.restore.plan import LoadPlanner
    from torchrec_checknrun.restore.warm_start import load_tables
    from torchrec_checknrun.root.policy import (
        Consecutive,
        Decision,
        Full,
        Intermittent,
        OneShot,
        Policy,
    )
    from torchrec_checknrun.root.report import CheckpointReport, RestoreReport
    from torchrec_checknrun.root.retention import Retention
    from torchrec_checknrun.run.arguments import PerRank, Replicated
    from torchrec_checknrun.run.checkpointer import Checkpointer
    from torchrec_checknrun.run.triggers import (
        AtEnd,
        EverySeconds,
        EverySteps,
        Moment,
        OnSigterm,
        Trigger,
    )
    from torchrec_checknrun.save.commit import StorageWriter
    from torchrec_checknrun.tools.compact import compact
    from torchrec_checknrun.tools.verify import verify

_HOME = {
    "Checkpointer": "run.checkpointer",
    "PerRank": "run.per_rank",
    "Replicated": "run.per_rank",
    "LoadPlanner": "restore.plan",
    "Consecutive": "root.policy",
    "Decision": "root.policy",
    "Full": "root.policy",
    "Intermittent": "root.policy",
    "OneShot": "root.policy",
    "Policy": "root.policy",
    "Quantization": "codecs.quantization",
    "CheckpointReport": "root.report",
    "RestoreReport": "root.report",
    "Retention": "root.retention",
    "SavePlanner": "save.planner",
    "StorageReader": "save.commit",
    "StorageWriter": "save.commit",
    "TrackedModel": "model.tracked",
    "TrackedShard": "model.tracked",
    "track": "model.tracked",
    "expected_restores": "codecs.bitwidth",
    "compact": "tools.compact",
    "load_tables": "restore.warm_start",
    "verify": "tools.verify",
    "Consumer": "model.marks",
    "AtEnd": "run.triggers",
    "EverySeconds": "run.triggers",
    "EverySteps": "run.triggers",
    "Moment": "run.triggers",
    "OnSigterm": "run.triggers",
    "Trigger": "run.triggers",
}

__all__ = [
    "AtEnd",
    "CheckpointReport",
    "Checkpointer",
    "Consecutive",
    "Consumer",
    "Decision",
    "EverySeconds",
    "EverySteps",
    "Full",
    "Intermittent",
    "LoadPlanner",
    "Moment",
    "OnSigterm",
    "OneShot",
    "PerRank",
    "Policy",
    "Quantization",
    "Replicated",
    "RestoreReport",
    "Retention",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TrackedModel",
    "TrackedShard",
    "Trigger",
    "__version__",
    "compact",
    "expected_restores",
    "load_tables",
    "track",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
