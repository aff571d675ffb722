"""Notice loaders whose place in the data is ahead of training, since a pipeline reads ahead.

TorchRec's pipelines hold batches that were read and not trained yet, and torchdata's loaders count
what they have handed out: a restored run would skip these batches.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from torchrec_checknrun.ranks import listed

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_LOADERS = "torchdata."
_PIPELINES = "torchrec.distributed.train_pipeline."


def warn_of_read_ahead(states: Mapping[str, object]) -> None:
    """Warn of torchdata's loaders among state objects where one of TorchRec's pipelines steps an
    optimizer among them.
    """
    loaders = [name for name, state in states.items() if _is_of(type(state), _LOADERS)]
    optimizers = [state for state in states.values() if isinstance(state, Optimizer)]
    if not (loaders and optimizers and (pipelines := _pipelines(optimizers))):
        return
    logger.warning(
        "a %s reads batches ahead of training, and state %s counts what it has handed out: where "
        "the pipeline reads from it, a restored run would skip the batches that were read and not "
        "trained. Give an object that keeps the loader's state of the batch that was trained last "
        "(docs/how-to/integrations.md, Position in the data)",
        listed(sorted(pipelines)),
        listed([*map(repr, loaders)]),
    )


def _pipelines(optimizers: list[Optimizer]) -> set[str]:
    """Return the kinds of TorchRec's pipelines that refer to an optimizer."""
    found: list[Any] = gc.get_referrers(*optimizers)
    found += gc.get_referrers(*(value for value in found if type(value) is dict))
    kinds = {type(value) for value in found}
    return {kind.__name__ for kind in kinds if _is_of(kind, _PIPELINES)}


def _is_of(kind: type, package: str) -> bool:
    return any(each.__module__.startswith(package) for each in kind.__mro__)
