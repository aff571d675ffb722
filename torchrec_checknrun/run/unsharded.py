"""Refuse a model without sharded tables.

Unsharded tables are dense parameters, which every checkpoint writes in full: nothing would be
saved by this package.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")


def refuse_unsharded(model: nn.Module, tables: Collection[str]) -> None:
    """Refuse embedding collections of which none is sharded; warn of some that are not.

    Args:
        tables: names of the sharded tables.

    Raises:
        ValueError: names the first collection and the remedy.
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    found = [
        (path or "itself", type(module).__name__)
        for path, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    if found and not tables:
        raise ValueError(
            f"model is not sharded: {found[0][0]} is a plain {found[0][1]}. Shard it first and "
            "give that, as model=DistributedModelParallel(model, device=device)"
        )
    if found:
        logger.warning(
            "not sharded, and so written in full with every checkpoint: %s",
            ", ".join(f"{path} ({kind})" for path, kind in found),
        )
