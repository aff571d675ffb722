"""Differential, quantized checkpoints for TorchRec, on torch.distributed.checkpoint.

Names are imported when they are first used: Hydra looks at this package in every app of an
environment that has it, and must not pay for torch and TorchRec there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchrec_checknrun.version import __version__

if TYPE_CHECKING:
    from torchrec_checknrun.bitwidth import expected_restores
    from torchrec_checknrun.checkpointer import Checkpointer
    from torchrec_checknrun.compaction import compact
    from torchrec_checknrun.load_planner import LoadPlanner
    from torchrec_checknrun.per_rank import PerRank, Replicated
    from torchrec_checknrun.policy import Consecutive, Decision, Full, Intermittent, OneShot, Policy
    from torchrec_checknrun.quantization import Quantization
    from torchrec_checknrun.report import CheckpointReport, RestoreReport
    from torchrec_checknrun.retention import Retention
    from torchrec_checknrun.save_planner import SavePlanner
    from torchrec_checknrun.storage import StorageReader, StorageWriter
    from torchrec_checknrun.tracked import TrackedModel, TrackedShard, track
    from torchrec_checknrun.tracking import Consumer
    from torchrec_checknrun.triggers import (
        AtEnd,
        EverySeconds,
        EverySteps,
        Moment,
        OnSigterm,
        Trigger,
    )
    from torchrec_checknrun.verification import verify
    from torchrec_checknrun.warm_start import load_tables

_HOME = {
    "Checkpointer": "checkpointer",
    "PerRank": "per_rank",
    "Replicated": "per_rank",
    "LoadPlanner": "load_planner",
    "Consecutive": "policy",
    "Decision": "policy",
    "Full": "policy",
    "Intermittent": "policy",
    "OneShot": "policy",
    "Policy": "policy",
    "Quantization": "quantization",
    "CheckpointReport": "report",
    "RestoreReport": "report",
    "Retention": "retention",
    "SavePlanner": "save_planner",
    "StorageReader": "storage",
    "StorageWriter": "storage",
    "TrackedModel": "tracked",
    "TrackedShard": "tracked",
    "track": "tracked",
    "expected_restores": "bitwidth",
    "compact": "compaction",
    "load_tables": "warm_start",
    "verify": "verification",
    "Consumer": "tracking",
    "AtEnd": "triggers",
    "EverySeconds": "triggers",
    "EverySteps": "triggers",
    "Moment": "triggers",
    "OnSigterm": "triggers",
    "Trigger": "triggers",
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
