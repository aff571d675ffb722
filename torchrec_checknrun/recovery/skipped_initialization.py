"""Build a model without initialising the tables that its image holds already.

TorchRec draws each table's rows twice when a model is built, which takes seconds a gigabyte; to go
back to a step in an image takes a tenth of that. Where an image is there, the draws are left out;
``restore`` makes up for them if it can't use the image after all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType

from torchrec_checknrun.memory.images import Images
from torchrec_checknrun.model.kernels import FUSED, embedding_collections
from torchrec_checknrun.store.folder import Folder

_MARK = "_checknrun_uninitialized"
"""Attribute of a collection whose sharded tables have no initial values yet."""


@contextmanager
def skip_initialization(
    root: str | os.PathLike[str], images: Images | None = None
) -> Iterator[bool]:
    """Build a model within this block: its sharded tables get no initial values if an earlier
    process has left this rank's image. Call ``Checkpointer.restore`` afterwards, which fills the
    tables from the image, from a checkpoint, or by TorchRec's initial values.

    No collective. Data-parallel tables, tables that are no fused kernel's, and a model that is not
    built on the meta device get their values as ever.

    Args:
        root: of the run, and ``images`` as given to the Checkpointer as ``survive``.

    Yields:
        Whether there is an image.
    """
    images = Images() if images is None else images
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not images.path(Folder(root).url, *ranks).is_file():
        yield False
        return
    with ExitStack() as patches:
        for kernel in FUSED:
            patches.enter_context(mock.patch.object(kernel, "init_parameters", _leave_out))
        for kind in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            reset = _reset_others(kind.reset_parameters)
            patches.enter_context(mock.patch.object(kind, "reset_parameters", reset))
        yield True


def why_uninitialized(model: nn.Module) -> str | None:
    """Return why a model can't be used before it is restored; None if it can."""
    if not any(True for _ in _uninitialized(model)):
        return None
    return (
        "the model was built within skip_initialization(), so its tables have no values yet: call "
        "restore() before the first step or save"
    )


def note_initialized(model: nn.Module) -> None:
    """Note that all rows of the model were written."""
    for collection in _uninitialized(model):
        delattr(collection, _MARK)


@torch.no_grad()
def initialize_skipped(model: nn.Module) -> None:
    """Give the tables the initial values that were left out, as TorchRec does."""
    for collection in _uninitialized(model):
        for module in chain.from_iterable(each.modules() for each in collection._lookups):
            if isinstance(module, FUSED):
                module.init_parameters()
        weights = _weights(collection)
        for config in _skipped(collection):
            config.init_fn(weights[config.name].weight)
        delattr(collection, _MARK)


def _uninitialized(model: nn.Module) -> Iterator[Any]:
    found = [collection for _, collection in embedding_collections(model)]
    return (collection for collection in found if hasattr(collection, _MARK))


def _leave_out(kernel: nn.Module) -> None:
    """Stand in for a kernel's own initialisation."""


def _reset_others(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a collection's ``reset_parameters`` that leaves its sharded tables out."""

    def reset_parameters(collection: Any) -> None:
        skipped = _skipped(collection)
        with ExitStack() as patches:
            for config in skipped:
                patches.enter_context(mock.patch.object(config, "init_fn", _same))
            reset(collection)
        if skipped:
            setattr(collection, _MARK, True)

    return reset_parameters


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _skipped(collection: Any) -> list[Any]:
    """Return the configurations of the tables in a collection's fused kernels on CPU memory."""
    if collection._device is not None and collection._device.type != "cpu":
        return []
    is_bag = isinstance(collection, ShardedEmbeddingBagCollection)
    configs = collection._embedding_bag_configs if is_bag else collection._embedding_configs
    whole = ShardingType.DATA_PARALLEL.value
    plan = collection.module_sharding_plan
    return [config for config in configs if plan[config.name].sharding_type != whole]


def _weights(collection: Any) -> Any:
    is_bag = isinstance(collection, ShardedEmbeddingBagCollection)
    return collection.embedding_bags if is_bag else collection.embeddings
