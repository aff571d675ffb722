"""Let a model load by itself what a restore in place can't give it.

A state dict may hold copies, since hooks clone, cast or gather tensors; a write into a copy never
reaches the model. Such models load their restored state dict by their own ``load_state_dict``, and
are checked afterwards to have taken the values. Others compute values from those that they load:
see ``values.own_loading``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchrec_checknrun.dense.references import local_tensors
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState
from torchrec_checknrun.model.state_dict import StoredTables
from torchrec_checknrun.model.tracked import TrackedModel
from torchrec_checknrun.ranks import listed
from torchrec_checknrun.values.own_loading import (
    EXTRA_STATE,
    is_extra_state,
    loads_plainly,
    plain_path,
    takes_shapes,
)
from torchrec_checknrun.values.state import (
    SHARDED,
    TORCH_DTYPES,
    Tree,
    are_convertible,
    encode_state,
)

logger = logging.getLogger(__name__)


def copied(
    model: nn.Module, content: object, tracked: TrackedModel
) -> dict[str, list[torch.Tensor]]:
    """Find the values of a model's state dict that share memory with no parameter, buffer or table.

    Returns:
        This rank's tensors of each value, by name; several of a sharded tensor. Empty if the
        content is no dict.
    """
    if not isinstance(content, dict):
        return {}
    own = (*model.parameters(), *model.buffers())
    memory = {_address(local) for tensor in own for local in _locals(tensor)}
    stored = StoredTables(tracked.tables, [shard.local for shard in tracked.shards])
    found = {name: _locals(value) for name, value in content.items()}
    return {
        name: locals_
        for name, locals_ in found.items()
        if any(_address(local) not in memory and not stored.holds(local) for local in locals_)
    }


def forget_pruning(model: nn.Module) -> None:
    """Let tables that are pruned in training (ITEP) be pruned in the next step that it is due, also
    where this process has done that step before: TorchRec's modules prune once a step, and note the
    last one outside of their state.
    """
    for module in model.modules():
        if "last_pruned_iter" in vars(module):
            vars(module)["last_pruned_iter"] = -1  # as in a new process


def other_extra_states(content: object) -> dict[str, Any]:
    """Find the modules' extra states in a model's state dict that are no tensors, by name: what a
    module shows may be a copy, so that only ``set_extra_state`` brings the content back.
    """
    items = content.items() if isinstance(content, dict) else ()
    return {n: v for n, v in items if not isinstance(v, torch.Tensor) and is_extra_state(n)}


def load_copied(model: nn.Module, content: Any, tracked: TrackedModel) -> None:
    """Let a model load the values restored into copies; values restored in place are loaded onto
    themselves. Call this on all ranks: loading may be a collective.

    Args:
        content: the model's state dict, restored.

    Raises:
        IncompatibleCheckpoint: the model didn't take a value; names the value.
    """
    copies = copied(model, content, tracked)
    wanted = {name: [local.clone() for local in locals_] for name, locals_ in copies.items()}
    # Encoded first: a module may keep the very object, and change it.
    given = {name: _encoded(value) for name, value in other_extra_states(content).items()}
    model.load_state_dict(content, strict=False)
    tracked.acknowledge_writes()  # of rows onto themselves
    now = model.state_dict()
    if others := [name for name, value in given.items() if _encoded(now.get(name)) != value]:
        logger.warning(
            "modules show other extra state than was restored: %s. What set_extra_state() made of "
            "the saved one goes on",
            listed(others),
        )
    for name, expected in wanted.items():
        found = _locals(now.get(name))
        if len(found) != len(expected) or not all(map(_is_same, found, expected)):
            raise IncompatibleCheckpoint(
                f"the model's state_dict() has a copy of {name!r}, and its load_state_dict() does "
                "not take it back: let state_dict() return parameters and buffers themselves, or "
                "let load_state_dict() restore what it returns"
            )


def of_fixed_shape(model: nn.Module | None, content: Any, saved: Mapping[Any, Tree]) -> Any:
    """Return a model's state dict without the values that were saved in another form, and whose
    module may take that: one that loads in a way of its own, as observers do, or extra state.

    Args:
        content: the state dict.
        saved: the saved nodes by name.
    """
    others = [
        name
        for name, value in content.items()
        if name in saved
        and isinstance(value, torch.Tensor)
        and not isinstance(value, SHARDED)
        and "x" in saved[name]
        and [*value.shape] != saved[name]["shape"]
        and are_convertible(TORCH_DTYPES.get(saved[name]["dtype"], torch.bool), value.dtype)
    ]
    others += [
        name
        for name, value in content.items()
        if name in saved
        and not (isinstance(value, torch.Tensor) and "x" in saved[name])
        and is_extra_state(name)
    ]
    if model is None or not others:
        return content
    owners = {plain_path(path): module for path, module in model.named_modules()}
    taken = {name for name in others if takes_shapes(owners, name)}
    return {name: value for name, value in content.items() if name not in taken}


def require_taken(model: nn.Module | None, names: Collection[str | int]) -> None:
    """Require that a model may load values that its state dict doesn't have now.

    A user's own loading may make a buffer for them; that of the libraries leaves them out.

    Args:
        names: of the values, which only the checkpoint has.

    Raises:
        IncompatibleCheckpoint: the model would lose them; names one.
    """
    if not names or model is None or not loads_plainly(model):
        return
    raise IncompatibleCheckpoint(
        f"model.{min(map(str, names))} is in the checkpoint only: build the model as it was when "
        "the checkpoint was saved (register buffers before the restore, as tensors, not as None), "
        "or leave out what only the checkpoint has with strict=False"
    )


def _encoded(value: object) -> object:
    """Return the content of extra state, to be compared; None if the content can't be stored."""
    with suppress(UnsupportedState):
        tree, pieces = encode_state(value, EXTRA_STATE)
        return tree, b"".join(pieces)
    return None


def _locals(value: object) -> list[torch.Tensor]:
    """List this rank's local tensors of a value that have memory."""
    return [
        local.detach()
        for local in local_tensors(value)
        if local.layout == torch.strided
        and not local.is_meta
        and local.numel() > 0
        # Tensors that only wrap other tensors have no memory, and are not saved.
        and not hasattr(local, "__tensor_flatten__")
    ]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    expected = expected.to(found.device)
    both_nan = (found != found) & (expected != expected)
    return bool(((found == expected) | both_nan).all())
