"""Compare a saved state with the live object, and merge the saved values into it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.placements import dtype_of
from torchrec_checknrun.values.dicts import like
from torchrec_checknrun.values.state import (
    SHARDED,
    TORCH_DTYPES,
    Tree,
    are_convertible,
    is_sharded,
    never,
    tree_items,
    tree_values,
)
from torchrec_checknrun.values.tensor_bytes import raw_bytes


def check_state(
    current: object,
    tree: Tree,
    path: str,
    covered: Callable[[object], bool],
    of_table: Callable[[object], bool] = never,
    exact: bool = False,
) -> None:
    """Refuse a saved tree that doesn't fit the live object, before anything is changed.

    Every key of a live dict must be saved, and tensors must have the saved shape and dtype; only
    floats are converted between dtypes. Additional saved keys fit, unless ``exact``, since some
    objects create their state late. Lists of another length fit as well: their length may vary
    over time.

    Args:
        covered: returns whether a leaf of ``current`` is restored as table rows.
        of_table: returns whether a key is a table's, under which an optimizer keeps values other
            than rows (its step counter): these depend on the table's sharding, and missing ones
            keep their live values.

    Raises:
        IncompatibleCheckpoint: names the key, saved and wanted.
    """
    if isinstance(current, dict) and "d" in tree:
        _check_items(current, tree_items(tree), path, covered, of_table, exact)
    elif isinstance(current, (list, tuple)):
        items = tree_values(tree)
        for i, value in enumerate(current if len(items) == len(current) else ()):
            check_state(value, items[i], f"{path}[{i}]", covered, of_table, exact)
    elif isinstance(current, torch.Tensor) and (
        not covered(current) or ("x" in tree and isinstance(current, SHARDED))
    ):
        wanted = f"{str(dtype_of(current)).removeprefix('torch.')} {list(current.shape)}"
        found = f"{tree['dtype']} {tree['shape']}" if "x" in tree else f"no tensor ({sorted(tree)})"
        if "x" not in tree or not _fits(current, TORCH_DTYPES.get(tree["dtype"]), tree["shape"]):
            raise IncompatibleCheckpoint(
                f"{path}: the checkpoint has {found}, the model wants {wanted}: build the model as "
                "it was when the checkpoint was saved; where the first forward pass makes the "
                "shape (observers), make one before restore(); or keep the present value with "
                "strict=False"
            )


def _check_items(
    current: dict[Any, Any],
    saved: Mapping[str | int, Tree],
    path: str,
    covered: Callable[[object], bool],
    of_table: Callable[[object], bool],
    exact: bool,
) -> None:
    """Check a live dict against the saved items; arguments as in ``check_state``."""
    for key, value in current.items():
        if key in saved:
            if of_table(key) and isinstance(value, dict) and "d" in saved[key]:
                known = tree_items(saved[key])
                value = {k: v for k, v in value.items() if k in known}
                check_state(value, saved[key], f"{path}.{key}", covered, of_table)
            else:
                check_state(value, saved[key], f"{path}.{key}", covered, of_table, exact)
        elif not of_table(key) and not _all_covered(value, covered):
            raise IncompatibleCheckpoint(
                f"{path}.{key} is not in the checkpoint, which has {_some(saved)}: restore with "
                "the model and state objects it was saved with, or keep the present value with "
                "strict=False"
            )
    extra = [key for key in saved.keys() - current.keys() if not of_table(key)]
    if exact and extra:
        raise IncompatibleCheckpoint(
            f"{path}.{extra[0]} is in the checkpoint only; the model's has {_some(current)}: "
            "restore with the state objects (the optimizer) it was saved with, or leave that out "
            "with strict=False"
        )


def _all_covered(value: object, covered: Callable[[object], bool]) -> bool:
    if isinstance(value, dict):
        return all(_all_covered(v, covered) for v in value.values())
    return covered(value)


def _some(saved: Mapping[Any, object]) -> str:
    names = [str(key) for key in saved]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing there"


def common_state(
    current: Any,
    saved: Any,
    path: str,
    skipped: list[str],
    covered: Callable[[object], bool],
    of_table: Callable[[object], bool] = never,
) -> Any:
    """Return the part of ``saved`` that fits a live state dict, for restores that aren't strict.

    Args:
        covered, of_table: as in ``check_state``.
        skipped: receives a line for each misfit: a key of one side only, or a tensor of another
            shape or dtype.
    """
    if isinstance(current, dict) and isinstance(saved, dict):
        skipped += [f"state {path}.{key}: only in the checkpoint" for key in saved.keys() - current]
        skipped += [
            f"state {path}.{key}: not in the checkpoint"
            for key, value in current.items()
            if not (key in saved or of_table(key) or _all_covered(value, covered))
        ]
        items = {
            key: common_state(current[key], value, f"{path}.{key}", skipped, covered, of_table)
            for key, value in saved.items()
            if key in current
        }
        return like(saved, items)
    if isinstance(current, torch.Tensor) and not (
        isinstance(saved, torch.Tensor) and _fits(current, saved.dtype, list(saved.shape))
    ):
        skipped.append(f"state {path}: of another shape or type than the model's")
        return current
    return saved


def _fits(current: torch.Tensor, dtype: torch.dtype | None, shape: list[int]) -> bool:
    own = dtype_of(current)
    same_type = dtype is not None and (own is None or are_convertible(dtype, own))
    return same_type and list(current.shape) == shape


def merge_state(
    current: Any,
    saved: Any,
    of_table: Callable[[object], bool] = never,
    kept: Callable[[Any, Any], bool] = lambda current, _: is_sharded(current),
) -> Any:
    """Merge saved values into a live state dict, in place where possible, and return the result.

    Live tensors keep their identity (they may be a model's parameters) and receive the saved
    content; keys that the checkpoint lacks keep their live values.

    Args:
        kept: returns whether a live value (with the saved one) stays as it is because it is
            restored elsewhere.
    """
    if kept(current, saved):
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        for key, value in saved.items():
            if not of_table(key):
                current[key] = merge_state(current.get(key), value, of_table, kept)
            elif isinstance(known := current.get(key), dict) and isinstance(value, dict):
                merge_state(known, {k: v for k, v in value.items() if k in known}, kept=kept)
        return current
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        if current.shape != saved.shape:  # the model's own loading takes it
            return saved.to(current)
        write_values(saved, current)
        return current
    return _graft(current, saved, kept)


@torch.no_grad()
def write_values(saved: torch.Tensor, target: torch.Tensor) -> None:
    """Copy saved values into a live tensor, of which an expanded one shows a value many times.

    Raises:
        IncompatibleCheckpoint: an expanded tensor has no place for so many values.
    """
    shown, values = target, saved
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            shown, values = shown.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if shown is not target and raw_bytes(values.expand_as(saved)) != raw_bytes(saved):
        raise IncompatibleCheckpoint(
            f"a tensor of shape {tuple(target.shape)} has values of its own in the checkpoint, and "
            "is one that expand() made of fewer values now: clone() it in the model"
        )
    shown.copy_(values)


def _graft(current: Any, saved: Any, kept: Callable[[Any, Any], bool]) -> Any:
    """Return the saved value, but with the live values that are restored elsewhere."""
    if kept(current, saved):
        return current
    if isinstance(current, dict) and isinstance(saved, dict):
        found = {key: _graft(current.get(key), value, kept) for key, value in saved.items()}
        others = {k: v for k, v in current.items() if k not in found and kept(v, None)}
        return like(saved, {**found, **others})
    same_kind = isinstance(saved, (list, tuple, deque)) and type(saved) is type(current)
    if same_kind and len(saved) == len(current):
        items = [_graft(c, s, kept) for c, s in zip(current, saved, strict=True)]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(current.dtype) if are_convertible(saved.dtype, current.dtype) else saved
    return saved
