"""Notice loaders whose place in the data is ahead of training, since a pipeline reads ahead.

TorchRec's pipelines hold batches that were read and not trained yet, and torchdata's loaders count
what they have handed out: a restored run would skip these batches.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Mapping

from torch.optim import Optimizer

from torchrec_checknrun.ranks import listed

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_LOADERS = "torchdata."
_PIPELINES = "torchrec.distributed.train_pipeline.train_pipelines"
_IN_STEP = ("TrainPipelinePT2", "EvalPipeline")
"""Beginnings of the names of pipelines that read one batch a step, or batches of evaluations."""


def warn_of_read_ahead(states: Mapping[str, object]) -> None:
    """Warn of torchdata's loaders among state objects where one of TorchRec's pipelines steps an
    optimizer among them, or reads for a loop that may do so.
    """
    loaders = [name for name, state in states.items() if _is_loader(type(state))]
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
    """Return the kinds of TorchRec's pipelines that read ahead and step an optimizer, or none."""
    base = getattr(sys.modules.get(_PIPELINES), "TrainPipeline", None)
    if base is None:
        return set()
    found = [value for value in gc.get_objects() if issubclass(type(value), base)]
    known = {id(optimizer) for optimizer in optimizers}
    return {
        type(pipeline).__name__
        for pipeline in found
        if not any(kind.__name__.startswith(_IN_STEP) for kind in type(pipeline).__mro__)
        # A StagedTrainPipeline has none: the loop around it steps.
        and (_optimizer_of(pipeline) is None or not known.isdisjoint(_stepped(pipeline)))
    }


def _stepped(pipeline: object) -> Iterator[int]:
    """Yield the ids of a pipeline's optimizer and of those inside its wrappers, as TorchRec's for
    the accumulation of gradients is one.
    """
    inside = _optimizer_of(pipeline)
    while inside is not None:
        yield id(inside)
        inside = _optimizer_of(inside)


def _optimizer_of(owner: object) -> object:
    return getattr(owner, "__dict__", {}).get("_optimizer")


def _is_loader(kind: type) -> bool:
    return any(each.__module__.startswith(_LOADERS) for each in kind.__mro__)
