"""Find TorchRec's newer pipelines, which its older releases lack."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


def newer(name: str, module: str = "train_pipelines") -> Any:
    """Return a class of ``torchrec.distributed.train_pipeline``; None where this TorchRec has none
    of that name.
    """
    found = None
    with suppress(ModuleNotFoundError):
        found = importlib.import_module(f"torchrec.distributed.train_pipeline.{module}")
    return getattr(found, name, None)
