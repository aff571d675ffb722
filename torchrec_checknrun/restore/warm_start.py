"""Tables of one run as the start of another: transfer learning, a new model on old embeddings."""

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
    """Loads some tables' rows from a checkpoint into a model; everything else stays as it is.

    Called on all ranks. The tables' rows count as modified for everyone who tracks the model, also
    if an error comes half-way.

    Args:
        root: where the checkpoints are.
        model: sharded in any way.
        tables: the model's tables to load, by full name, or its last part where that is unique.
        checkpoint: an id; None for the newest whole chain.
        map: saved table name to the model's, where they differ.
        shrink: whether a table may have fewer rows than were saved.
        optimizer: whether the rows' fused optimizer state is loaded, too.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        CheckNRunError: as ``Checkpointer.restore``.
    """
    fit = Fit(map or {}, strict=True, shrink=shrink, optimizer=optimizer, only=tuple(tables))
    tracked = track(model)
    ranks = Ranks(timedelta(seconds=timeout_seconds))
    try:
        target = Target(None, tracked, {}, {}, fit)
        found = restore(Folder(root, timeout_seconds), target, ranks, checkpoint, verify_all=False)
        if found is None:
            raise CheckpointNotFound(f"no committed checkpoint in {root}: nothing to load from")
        return found
    finally:
        tracked.close()
        ranks.close()
