"""Load tables of another run: transfer learning, or a new model on old embeddings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch import nn

from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.model.tracked import track
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.restore.fit import Fit
from torchrec_checknrun.restore.restore import Restored, Target, restore
from torchrec_checknrun.store.folder import Folder


def load_tables(
    root: str | os.PathLike[str],
    model: nn.Module,
    tables: Sequence[str],
    *,
    checkpoint: str | None = None,
    map: Mapping[str, str] | None = None,
    shrink: bool = False,
    optimizer: bool = False,
    timeout_seconds: float = 1800.0,
) -> Restored:
    """Load some tables' rows from a checkpoint into a model; everything else stays as it is.

    Call this on all ranks. The tables' rows count as modified for every tracker of the model, also
    if an error comes half-way.

    Args:
        root: a path or fsspec URL that holds the checkpoints.
        model: the model, with any sharding plan.
        tables: the model's tables to load, by full name, or its last part where that is unique.
        checkpoint: a checkpoint's id; None: the head of the newest whole chain.
        map: the model's table name by saved name, where they differ.
        shrink: allow tables with fewer rows than were saved.
        optimizer: load the rows' fused optimizer state, too.
        timeout_seconds: limit for each storage operation and each wait for another rank.

    Returns:
        The chain that was loaded, and descriptions of skipped tables and states.

    Raises:
        CheckpointNotFound: the root holds no committed checkpoint.
        CheckNRunError: see ``Checkpointer.restore``.
    """
    fit = Fit(map or {}, strict=True, shrink=shrink, optimizer=optimizer, only=tuple(tables))
    tracked = track(model)
    ranks = Ranks(timedelta(seconds=timeout_seconds))
    try:
        tracked.agree(ranks)
        target = Target(None, tracked, {}, {}, fit)
        found = restore(Folder(root, timeout_seconds), target, ranks, checkpoint, verify_all=False)
        if found is None:
            raise CheckpointNotFound(f"no committed checkpoint in {root}: nothing to load from")
        return found
    finally:
        tracked.close()
        ranks.close()
