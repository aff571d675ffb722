"""Pack the values that an optimizer's wrapper holds into plain values, and put them back.

Lists and dicts are packed item by item: references in them (see ``References``) are left out and
keep their live values. Modules and other objects with a state dict are packed as that. A parameter
that is a key of a dict or a member of a set is packed as its name, and so is the id of a parameter
or of a parameter group anywhere, since programs keep what belongs to either by it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from torchrec_checknrun.dense.references import References
from torchrec_checknrun.dense.tree import Key
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.values.dicts import like
from torchrec_checknrun.values.state import MOST_DEPTH, TORCH_DTYPES, encode_state

_LIVE, _STATE, _ENUM, _DICT = "$live", "$state", "$enum", "$dict"
"""The only key of a dict that stands for a reference, a state dict's content, the name of an enum's
member, or a dict that itself has one such key."""
_ID, _ITEMS, _SET = "$id", "$items", "$set"
"""The same of the name of what has an id that is meant, and of a dict or set with members that
``_pack_member`` packs: an empty dict of its type and its items; a set of them."""
_MARKS = frozenset({_LIVE, _STATE, _ENUM, _DICT, _ID, _ITEMS, _SET})
_PARAMETER = "$parameter"
Member = str | int | tuple[str, Key]
"""A key or a member of a set; a name with the mark for a parameter itself or for an id."""
LIVE = {_LIVE: None}
"""Stands for a reference."""
_MISSING = object()
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of values that are never references, and stored as they are."""


def pack(
    value: Any, references: References, path: str, lost: dict[str, object], depth: int = 0
) -> Any:
    """Turn a live value into one that can be stored, with the live tensors.

    Args:
        references: values that are stored elsewhere.
        path: the value's name.
        lost: receives the values that can't be stored, by path.

    Returns:
        ``LIVE`` for a reference, for a container of nothing but references, and for a lost value.
    """
    if type(value) in _PLAIN:  # most values
        return value if (name := references.name(value)) is None else {_ID: name}
    if value in references:
        return LIVE
    if isinstance(value, torch.Tensor):
        return value if _can_store(value) else _lose(value, path, lost)
    if depth > MOST_DEPTH:
        return _lose(value, path, lost)
    if isinstance(value, Mapping):
        return _pack_mapping(value, references, path, lost, depth)
    if isinstance(value, (list, tuple, deque)):
        return _pack_sequence(value, references, path, lost, depth)
    if isinstance(value, (set, frozenset)) and any(references.name(m) is not None for m in value):
        return _pack_set(value, references, path, lost)
    if isinstance(value, Enum):
        member = value.name
        return {_ENUM: member} if _member(value, member) is value else _lose(value, path, lost)
    if _has_state(value):
        return _pack_state(value, references, path, lost, depth)
    try:
        encode_state(value, path)
    except UnsupportedState:
        return _lose(value, path, lost)
    return value


def is_state(packed: Any) -> bool:
    """Tell whether a packed value is the content of an object's state dict."""
    return _marked(packed)[0] == _STATE


def same(one: Any, other: Any) -> bool:
    """Return whether two packed values have the same stored bytes."""
    (tree, pieces), (other_tree, other_pieces) = encode_state(one, ""), encode_state(other, "")
    return tree == other_tree and b"".join(pieces) == b"".join(other_pieces)


def why_not(live: Any, saved: Any, references: References) -> str | None:
    """Return the reason why a packed value can't replace a live one; None if it can."""
    mark, content = _marked(saved)
    if mark == _LIVE:
        return "it refers to a value that is missing now" if live is _MISSING else None
    if mark == _ENUM and _member(live, content) is None:
        return f"it was {content!r}, a member of an enum, and is a {type(live).__name__} now"
    if mark == _STATE:
        if not _has_state(live) or live in references:
            return f"it had a state dict, and is a {type(live).__name__} now"
        own = live.state_dict()
        return _why_not_module(own, content) if isinstance(live, nn.Module) else None
    names = [content] if mark == _ID else _names_in(mark, content)
    for name in names:
        if name not in references.named:
            return f"it was kept for {name!r} by its id, or as a key, which is missing now"
    if mark == _ITEMS:
        pairs = content[1]
        inner: Iterable[tuple[Any, Any]] = [(_live_member(k, references), v) for k, v in pairs]
    elif isinstance(content, dict) and mark in (None, _DICT):
        inner = content.items()
    elif isinstance(saved, (list, tuple)):
        inner = enumerate(saved)
    else:
        return None
    found = (why_not(_item(live, key), item, references) for key, item in inner)
    return next((why for why in found if why is not None), None)


def put(
    live: Any,
    saved: Any,
    references: References,
    device: torch.device | None,
    fresh: bool = False,
) -> Any:
    """Replace a live value by a packed one, for which ``why_not`` returned None.

    Tensors, lists, dicts and objects with a state dict keep their identity.

    Args:
        device: the device of tensors without a live counterpart.
        fresh: make new tensors, lists and dicts of the live ones' types instead: the live ones may
            belong to the code that made the wrapper.

    Returns:
        The value to use in the live one's place, often the live one itself.
    """
    mark, content = _marked(saved)
    if mark == _LIVE or live in references:
        return live
    if mark == _ENUM:
        return _member(live, content)
    if mark == _STATE:
        live.load_state_dict(put(live.state_dict(), content, references, device, fresh=True))
        return live
    if isinstance(saved, torch.Tensor):
        return _put_tensor(live, saved, device, fresh)
    if mark == _ID:
        return id(references.named[content])
    if mark == _SET:
        return type(content)(_live_member(member, references) for member in content)
    if mark == _ITEMS:
        content = like(content[0], {_live_member(k, references): v for k, v in content[1]})
    if isinstance(content, dict):
        items = {k: put(_item(live, k), v, references, device, fresh) for k, v in content.items()}
        if not isinstance(live, dict):
            return like(content, items)
        items |= {k: v for k, v in live.items() if k not in items and v in references}
        target = copy.copy(live) if fresh else live
        target.clear()
        target.update(items)
        return target
    if isinstance(saved, (list, tuple)):
        found = [put(_item(live, i), v, references, device, fresh) for i, v in enumerate(saved)]
        if not isinstance(live, (list, deque)) or not isinstance(saved, list):
            return type(saved)(found)
        sequence = copy.copy(live) if fresh else live
        sequence.clear()
        sequence.extend(found)
        return sequence
    return copy.deepcopy(saved) if fresh else saved


def _pack_mapping(
    value: Mapping[Any, Any],
    references: References,
    path: str,
    lost: dict[str, object],
    depth: int,
) -> Any:
    items = {
        k: pack(v, references, f"{path}[{_shown_key(k, references)}]", lost, depth + 1)
        for k, v in value.items()
    }
    if items and all(item is LIVE for item in items.values()):
        return LIVE
    if any(references.name(key) is not None for key in items):
        return _pack_items(value, items, references, path, lost)
    if not isinstance(value, dict) or any(type(key) not in (str, int) for key in items):
        return _lose(value, path, lost)
    return {_DICT: items} if len(items) == 1 and items.keys() <= _MARKS else like(value, items)


def _shown_key(key: object, references: References) -> str:
    if (name := references.name(key)) is not None:
        return repr(name)
    return "…" if isinstance(key, torch.Tensor) else repr(key)  # a tensor's takes a millisecond


def _pack_items(
    value: Mapping[Any, Any],
    items: Mapping[Any, Any],
    references: References,
    path: str,
    lost: dict[str, object],
) -> Any:
    """Pack a dict with parameters or ids among its keys, given its packed items."""
    pairs = [(_pack_member(key, references), item) for key, item in items.items()]
    if not isinstance(value, dict) or any(member is None for member, _ in pairs):
        return _lose(value, path, lost)
    return {_ITEMS: (like(value, {}), pairs)}


def _pack_set(
    value: set[Any] | frozenset[Any], references: References, path: str, lost: dict[str, object]
) -> Any:
    """Pack a set with parameters or ids among its members."""
    members = [_pack_member(member, references) for member in value]
    if type(value) not in (set, frozenset) or None in members:
        return _lose(value, path, lost)
    return {_SET: type(value)(members)}


def _pack_member(key: object, references: References) -> Member | None:
    """Pack a key, or a member of a set; None: it can't be stored."""
    if (name := references.name(key)) is not None:
        return (_ID if type(key) is int else _PARAMETER, name)
    return key if isinstance(key, (str, int)) and type(key) in (str, int) else None


def _live_member(member: Member, references: References) -> Any:
    """Return what was packed as a member; the object of its name is there."""
    if not isinstance(member, tuple):
        return member
    kind, name = member
    named = references.named[name]
    return named if kind == _PARAMETER else id(named)


def _names_in(mark: str | None, content: Any) -> list[Key]:
    """Return the names among a packed dict's keys, or a set's members."""
    members = [key for key, _ in content[1]] if mark == _ITEMS else content if mark == _SET else ()
    return [member[1] for member in members if isinstance(member, tuple)]


def _pack_sequence(
    value: Iterable[Any], references: References, path: str, lost: dict[str, object], depth: int
) -> Any:
    items = [pack(v, references, f"{path}[{i}]", lost, depth + 1) for i, v in enumerate(value)]
    if items and all(item is LIVE for item in items):
        return LIVE
    if isinstance(value, tuple):
        return tuple(items) if type(value) is tuple else _lose(value, path, lost)
    return items


def _pack_state(
    value: Any, references: References, path: str, lost: dict[str, object], depth: int
) -> Any:
    """Pack an object with a state dict, as the content of that."""
    within: dict[str, object] = {}
    try:
        content = pack(value.state_dict(), references, path, within, depth + 1)
    except Exception:  # a user's state_dict may raise anything; the object is reported as lost
        return _lose(value, path, lost)
    return _lose(value, path, lost) if within else {_STATE: content}


def _lose(value: object, path: str, lost: dict[str, object]) -> Any:
    lost[path] = value
    return LIVE


def _can_store(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and str(tensor.dtype).removeprefix("torch.") in TORCH_DTYPES
    )


def _has_state(value: object) -> bool:
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _marked(saved: Any) -> tuple[str | None, Any]:
    """Split a packed value into its mark, if any, and its content."""
    if isinstance(saved, dict) and len(saved) == 1:
        ((key, content),) = saved.items()
        if key in _MARKS:
            return key, content
    return None, saved


def _member(live: object, name: str) -> object:
    """Return the member of a live member's enum with a name; None if there is none."""
    return type(live).__members__.get(name) if isinstance(live, Enum) else None


def _why_not_module(own: Mapping[str, Any], content: Any) -> str | None:
    saved: dict[str, Any] = content if isinstance(content, dict) else {}
    if saved == LIVE:
        return None
    for key in sorted(own.keys() ^ saved.keys()):
        return f"{key!r} is only in its {'saved' if key in saved else 'present'} state dict"
    for key, value in saved.items():
        shape = getattr(own[key], "shape", None)
        if isinstance(value, torch.Tensor) and shape != value.shape:
            return f"its {key!r} was saved as {list(value.shape)}, and is {list(shape or [])} now"
    return None


def _item(live: Any, key: Any) -> Any:
    if isinstance(live, dict):
        return live.get(key, _MISSING)
    found = isinstance(live, (list, tuple, deque)) and type(key) is int and key < len(live)
    return live[key] if found else _MISSING


def _put_tensor(
    live: Any, saved: torch.Tensor, device: torch.device | None, fresh: bool
) -> torch.Tensor:
    if not isinstance(live, torch.Tensor):
        return saved if device is None else saved.to(device)
    # In another order, as a decomposition returns it, the program has put a new one in its place.
    same_order = saved.is_contiguous() or live.stride() == saved.stride()
    if not fresh and same_order and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        with torch.no_grad():
            return live.copy_(saved)
    made = saved.to(live.device)
    return nn.Parameter(made, live.requires_grad) if isinstance(live, nn.Parameter) else made
