"""Build a model without initialising the tables that its image holds already.

TorchRec draws each table's rows twice when a model is built, which takes seconds a gigabyte; to go
back to a step in an image takes a tenth of that. Where an image is there, the draws are left out;
``restore`` makes up for them if it can't use the image after all.

Until then the first and the last row of each such table are NaN: what a program has written there
meanwhile, such as pretrained rows, is told by these from memory without values, and is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from torchrec_checknrun.errors import ModelPartlyRestored
from torchrec_checknrun.memory.images import Images
from torchrec_checknrun.model.kernels import FUSED
from torchrec_checknrun.model.module_tree import embedding_collections
from torchrec_checknrun.store.folder import Folder

_MARK = "_checknrun_uninitialized"
"""Attribute of a collection, and of its kernels, whose tables have no initial values yet."""
_WHY = "the model was built within skip_initialization(), so its tables have no values yet: call "


@contextmanager
def skip_initialization(
    root: str | os.PathLike[str], images: Images | None = None
) -> Iterator[bool]:
    """Build a model within this block: its sharded tables get no initial values if an earlier
    process has left this rank's image. Call ``Checkpointer.restore`` afterwards, which fills the
    tables from the image, from a checkpoint, or by TorchRec's initial values.

    No collective. Data-parallel tables and tables that are no fused kernel's get their values as
    ever. A table that is written as a whole before ``restore`` keeps what was written; a lookup
    before either raises ``ModelPartlyRestored``, also in a model that no Checkpointer knows.

    Args:
        root: of the run, and ``images`` as given to the Checkpointer as ``survive``.

    Yields:
        Whether there is an image.
    """
    images = Images() if images is None else images
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not images.path(Folder(root).place, *ranks).is_file():
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
    return _WHY + "restore() before the first step or save"


def note_initialized(model: nn.Module) -> None:
    """Note that all rows of the model were written."""
    for _, collection in _uninitialized(model):
        for kernel in _kernels(collection):
            _forget(kernel)
        delattr(collection, _MARK)


@torch.no_grad()
def initialize_skipped(model: nn.Module) -> list[str]:
    """Give the tables the initial values that were left out, as TorchRec does, but for tables that
    were written as a whole since.

    Returns:
        The tables of which only a part may have been written since, which is lost.
    """
    lost: set[str] = set()
    for prefix, collection in _uninitialized(model):
        kernels = _kernels(collection)
        writes = [_writes(kernel) for kernel in kernels]
        partly = {name for each in writes for name in each.partly}
        whole = {name for each in writes for name in each.whole} - partly
        for kernel in kernels:
            for name, weight, low, high in _tables(kernel):
                if name not in whole:
                    weight.uniform_(low, high)
        weights = _weights(collection)
        for config in _skipped(collection):
            if config.name not in whole:
                config.init_fn(weights[config.name].weight)
        lost |= {prefix + name for name in partly}
    note_initialized(model)
    return sorted(lost)


@dataclass(frozen=True)
class _Writes:
    """The tables in a kernel that were written since: as a whole, or perhaps in part."""

    whole: frozenset[str]
    partly: frozenset[str]


def _writes(kernel: Any) -> _Writes:
    ends: dict[str, list[bool]] = {}
    for name, weight, *_ in _tables(kernel):
        ends.setdefault(name, []).extend(bool(end.isnan().all()) for end in _ends(weight))
    whole = frozenset(name for name, empty in ends.items() if not any(empty))
    partly = {name for name, empty in ends.items() if any(empty) and not all(empty)}
    if not (partly or whole) and _version(kernel) != getattr(kernel, _MARK).version:
        partly = set(ends)  # rows between the ends, of any of them
    return _Writes(whole, frozenset(partly))


@dataclass
class _Empty:
    """Notes on a kernel whose tables have no values yet.

    Attributes:
        version: of its memory.
        hook: refuses lookups.
    """

    version: int
    hook: RemovableHandle


def _empty(kernel: Any) -> None:
    """Mark a kernel's tables as having no values."""
    _forget(kernel)
    with torch.no_grad():
        for _, weight, *_ in _tables(kernel):
            for end in _ends(weight):
                end.fill_(torch.nan)
    setattr(kernel, _MARK, _Empty(_version(kernel), kernel.register_forward_pre_hook(_refuse)))


def _forget(kernel: Any) -> None:
    if hasattr(kernel, _MARK):
        getattr(kernel, _MARK).hook.remove()
        delattr(kernel, _MARK)


def _refuse(kernel: Any, _: object) -> None:
    """Refuse a lookup in tables without values."""
    if len(_writes(kernel).whole) < len({name for name, *_ in _tables(kernel)}):
        raise ModelPartlyRestored(
            _WHY + "restore() of its Checkpointer before the first lookup; build a model that has "
            "none outside of the block"
        )
    _forget(kernel)


def _tables(kernel: Any) -> Iterator[tuple[str, torch.Tensor, float, float]]:
    """Yield the name, local weight and initial bounds of each table that has rows here."""
    tables = kernel._config.embedding_tables
    bounds = kernel._weight_init_mins, kernel._weight_init_maxs
    weights = kernel.split_embedding_weights()
    for table, weight, low, high in zip(tables, weights, *bounds, strict=True):
        if weight.numel():
            yield table.name, weight.detach(), low, high


def _ends(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight[0], weight[-1]


def _version(kernel: Any) -> int:
    weight = kernel.split_embedding_weights()[0]
    return -1 if weight.is_inference() else weight._version


def _uninitialized(model: nn.Module) -> Iterator[tuple[str, Any]]:
    found = [*embedding_collections(model)]
    return ((prefix, each) for prefix, each in found if hasattr(each, _MARK))


def _kernels(collection: Any) -> list[Any]:
    modules = chain.from_iterable(each.modules() for each in collection._lookups)
    return [module for module in modules if isinstance(module, FUSED)]


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
            for kernel in _kernels(collection):
                _empty(kernel)
            setattr(collection, _MARK, True)

    return reset_parameters


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _skipped(collection: Any) -> list[Any]:
    """Return the configurations of the tables that this rank's fused kernels have on the CPU."""
    if collection._device is not None and collection._device.type != "cpu":
        return []
    is_bag = isinstance(collection, ShardedEmbeddingBagCollection)
    configs = collection._embedding_bag_configs if is_bag else collection._embedding_configs
    here = {name for kernel in _kernels(collection) for name, *_ in _tables(kernel)}
    return [config for config in configs if config.name in here]


def _weights(collection: Any) -> Any:
    is_bag = isinstance(collection, ShardedEmbeddingBagCollection)
    return collection.embedding_bags if is_bag else collection.embeddings
