"""Find the modules that do more than to copy values when they load, and let them load again.

Such modules compute values from those that they load, in hooks and methods of their own. Whoever
writes the values in place has to have this done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

EXTRA_STATE = "_extra_state"
"""The last part of the names that PyTorch gives what ``get_extra_state`` returns."""
_OF_EXTRA = f".{EXTRA_STATE}"
_AROUND = frozenset({"_dmp_wrapped_module", "_orig_mod", "module"})
"""Parts of names that wrappers of DistributedModelParallel and others add."""
_LIBRARIES = ("torch.nn.", "torch.distributed.", "torch.jit.", "torchrec.")
"""Packages whose modules load no more than their state dicts have."""
_DERIVING = (
    "torchrec.modules.keyed_jagged_tensor_pool",
    "torchrec.modules.object_pool_lookups",  # offsets of the values
)
"""Modules of these packages in which classes compute more from what they load."""


def plain_path(path: str) -> str:
    """Return a module's path without the parts that its wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _AROUND)


def is_extra_state(name: object) -> bool:
    """Return whether a name in a model's state dict is that of a module's extra state."""
    return isinstance(name, str) and (name == EXTRA_STATE or name.endswith(_OF_EXTRA))


def loads_more(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, does more when it loads than to copy values."""
    return _loads_own_way(model) or next(_deriving(model), None) is not None


def load_again(model: nn.Module, memory: frozenset[int] | None = None) -> None:
    """Let a model, or its parts that do more than to copy values, load what they hold, so that
    what they compute from it follows.

    Args:
        memory: addresses of the storages of the values that parts load; None: all.
    """
    if _loads_own_way(model):
        model.load_state_dict(model.state_dict(), strict=False)
        return
    for module in _deriving(model):
        # PyTorch calls no ``load_state_dict`` of a part's own either.
        nn.Module.load_state_dict(module, _held(module, memory), strict=False)


def loads_plainly(model: nn.Module) -> bool:
    """Return whether a model, and all of its parts, load no more than they have."""
    return all(map(_loads_plainly, model.modules()))


def takes_shapes(owners: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether a module may take a value of another shape than it has.

    Args:
        owners: modules by ``plain_path``.
        name: the value's, in the state dict of the model.
    """
    path, _, last = name.rpartition(".")
    module = owners.get(plain_path(path))
    if module is None:
        return False
    kind = type(module)
    if last == EXTRA_STATE:
        return not _adds_nothing(kind.set_extra_state)
    return not all(map(_adds_nothing, (kind._load_from_state_dict, *_pre_hooks(module))))


def _held(module: nn.Module, memory: frozenset[int] | None) -> dict[str, object]:
    content = module.state_dict()
    if memory is not None:
        for name, value in [*content.items()]:
            plain = type(value) in (torch.Tensor, nn.Parameter)
            if not plain or value.untyped_storage().data_ptr() not in memory:
                del content[name]
    return content


def _deriving(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that do more than to copy values as parts of a model."""
    loading = type(module)._load_from_state_dict
    hooks = (*_pre_hooks(module), *module._load_state_dict_post_hooks.values())
    own = (loading, type(module).set_extra_state, *hooks)
    if loading.__module__ in _DERIVING or not all(map(_adds_nothing, own)):
        yield module
        return
    for child in module.children():
        yield from _deriving(child)


def _loads_plainly(module: nn.Module) -> bool:
    kind = type(module)
    loads = (kind._load_from_state_dict, kind.set_extra_state, *_pre_hooks(module))
    return not _loads_own_way(module) and all(map(_adds_nothing, loads))


def _loads_own_way(module: nn.Module) -> bool:
    return "load_state_dict" in vars(module) or not _adds_nothing(type(module).load_state_dict)


def _pre_hooks(module: nn.Module) -> Iterator[object]:
    return (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())


def _adds_nothing(function: object) -> bool:
    """Return whether a method or hook of loading is of a package that only copies values."""
    return str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
