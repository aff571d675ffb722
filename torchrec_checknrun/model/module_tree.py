"""Find modules in a model, and notice when modules, parameters or buffers are other objects.

To find kernels and tables, or to ask a model for its state dict, takes a large model a good part of
a millisecond, and says the same each time. To compare the objects that the answer was made of takes
a small part of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torchrec.distributed.composable.table_batched_embedding_slice import (
    TableBatchedEmbeddingSlice,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_checknrun.dense.references import local_tensors
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.native import TensorPlaces
from torchrec_checknrun.values.dense import is_dense

_PLAIN = (torch.Tensor, nn.Parameter, TableBatchedEmbeddingSlice)
"""Types of tensors that are all here, and of which nothing but their memory is looked at."""
_LIBRARIES = frozenset({"torch", "torchrec", "fbgemm_gpu"})


class ModuleTree:
    """A model's modules, with the lookups that TorchRec's collections keep in lists."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._generation = 0
        self._known = False
        self._collections: list[Any] = []
        self._modules: list[nn.Module] = []
        self._held: list[Any] = []
        """The containers of all that is compared by identity, most of them empty."""
        self._filled: list[Iterable[object]] = []
        """Live views of those that were not empty when last looked at."""
        self._tensors: list[torch.Tensor] = []
        self._places = TensorPlaces(())
        self._sharded: list[object] = []
        self._sizes: list[int] = []
        self._before: list[list[Any]] = []
        self._kept: list[object] = []
        """The content of ``_filled`` then."""

    def forget(self) -> None:
        """Take the model for changed."""
        self._known = False

    def generation(self) -> int:
        """Return a number, another one than before if a module, a parameter or a buffer is another
        object, or memory of the model's state lies elsewhere or in another form, than when it was
        last asked for.
        """
        if not (self._known and self._holds_same()):
            self._look()
            self._generation += 1
        return self._generation

    @property
    def latest(self) -> int:
        """Return the number as it was when ``generation`` was last asked for."""
        return self._generation

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether all of these tensors are memory of the model, as it was last looked at."""
        locals_ = chain(self._tensors, *map(local_tensors, self._sharded))
        known = {tensor.data_ptr() for tensor in locals_}
        return all(
            tensor.is_cpu and tensor.is_contiguous() and tensor.data_ptr() in known
            for tensor in tensors
            if tensor.numel()
        )

    def has_plain_state_dict(self) -> bool:
        """Return whether only methods and hooks of PyTorch and its libraries make the state dict.

        Those of a user may say something else the next time.
        """
        return all(
            "state_dict" not in vars(module)
            and _is_librarys(type(module).state_dict)
            and _is_librarys(type(module)._save_to_state_dict)
            and _is_librarys(type(module).get_extra_state)
            and all(map(_is_librarys, module._state_dict_hooks.values()))
            and all(map(_is_librarys, module._state_dict_pre_hooks.values()))
            for module in self._modules
        )

    def _look(self) -> None:
        self._collections = [collection for _, collection in embedding_collections(self._model)]
        self._modules = list(self._model.modules())
        _refuse_flat(self._modules)
        modules = dict.fromkeys(self._modules)
        for collection in self._collections:
            for lookup in collection._lookups:
                modules |= dict.fromkeys(lookup.modules())
        self._held = [held for module in modules for held in _held(module)]
        self._held += [collection._lookups for collection in self._collections]
        tensors = [
            tensor
            for module in self._modules  # kernels look after their own memory
            for tensor in chain(module._parameters.values(), module._buffers.values())
            if tensor is not None
        ]
        self._tensors = [t for t in tensors if type(t) in _PLAIN and is_dense(t)]
        others = [t for t in tensors if type(t) not in _PLAIN]
        if any(is_lazy(tensor) for tensor in others):
            _refuse_lazy(self._model)
        self._sharded = [*others]
        self._places = TensorPlaces(self._tensors)
        self._sizes = [*map(len, self._held)]
        self._filled = [
            h if isinstance(h, (set, list)) else h.values() for h in self._held if len(h)
        ]
        self._kept = [*chain.from_iterable(self._filled)]
        self._before = self._now()
        self._known = True

    def _holds_same(self) -> bool:
        """Return whether the containers hold the same objects, as many as before, in the same
        memory, found by loops in C: a large model has thousands.
        """
        return (
            [*map(len, self._held)] == self._sizes
            and all(map(is_, chain.from_iterable(self._filled), self._kept))
            and self._places.same()
            and self._now() == self._before
        )

    def _now(self) -> list[list[Any]]:
        """Return all else that is compared."""
        return [
            [id(collection._lookups) for collection in self._collections],
            [
                (t.data_ptr(), t.shape, t.dtype, t.stride())
                for t in chain(*map(local_tensors, self._sharded))
            ],
        ]


def embedding_collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the sharded collections, each with its tables' prefix in the state dict."""
    kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
    for path, module in find_modules(model, kinds):
        is_bag = isinstance(module, ShardedEmbeddingBagCollection)
        name = "embedding_bags" if is_bag else "embeddings"
        yield f"{path}.{name}." if path else f"{name}.", module


def find_modules(
    module: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, Any]]:
    """Yield the modules of some kinds, each once, with its state-dict path.

    Wrappers (DistributedModelParallel, DistributedDataParallel) add nothing to the path.
    """
    seen: set[int] = set()
    left = [("", module)]
    while left:
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, kinds):
            yield path, module
        elif isinstance(module, (DistributedModelParallel, DistributedDataParallel)):
            left.append((path, module.module))
        else:
            children = [*module.named_children()]
            left += [(f"{path}.{n}" if path else n, child) for n, child in reversed(children)]


def _refuse_flat(modules: Iterable[nn.Module]) -> None:
    """Refuse PyTorch's first FSDP: each rank has another part of a parameter, and no tensor says
    so; its state dict is of copies, on all ranks together.

    Raises:
        UnsupportedState: names the module inside.
    """
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            inside = ", ".join(type(each).__name__ for each in module.children())
            raise UnsupportedState(
                f"the model has a FullyShardedDataParallel around {inside}, whose parts can't be "
                "told from whole parameters: shard it by torch.distributed.fsdp.fully_shard "
                "(FSDP2) in its place, or leave it to DistributedDataParallel"
            )


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse the parameters of lazy modules, which have neither shape nor memory yet.

    Raises:
        UnsupportedState: names one.
    """
    own = chain(model.named_parameters(), model.named_buffers())
    name = next(name for name, tensor in own if is_lazy(tensor))
    raise UnsupportedState(
        f"{name} of the model is of a lazy module, and has no shape yet: make one forward pass "
        "before the Checkpointer, without gradients"
    )


def _held(module: nn.Module) -> Iterator[Any]:
    """Yield a module's dicts, and one set, that decide on its part of a state dict."""
    yield module._modules
    yield module._parameters
    yield module._buffers
    yield module._non_persistent_buffers_set
    yield module._state_dict_hooks
    yield module._state_dict_pre_hooks


def _is_librarys(function: object) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES
