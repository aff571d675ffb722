"""Whole trees of stored state objects: the stored tree, with nodes added for sharded tensors.

Sharded tensors are stored apart, as blocks. With a node for each of them a tree is whole again, so
that a sharded tensor can be compared with a plain one, and each restored into the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.chunk import BlockHeader, Path, dtype_name
from torchrec_checknrun.placements import dtype_of
from torchrec_checknrun.restore.blocks import SavedBlocks
from torchrec_checknrun.values.dicts import KIND
from torchrec_checknrun.values.keys import decode_key
from torchrec_checknrun.values.members import MEMBER, AbsentMember, decode_member
from torchrec_checknrun.values.state import Tree, tree_items, tree_values


def with_blocks(tree: Tree, name: str, saved: SavedBlocks) -> Tree:
    """Return a tree with nodes added for a state's sharded tensors, as if plain, without bytes.

    Args:
        tree: the stored tree, not changed.
        name: the state's name.
        saved: the checkpoint's sharded tensors.
    """
    added: _Added = {}
    for path, pieces in saved.items():
        if path[0] == name and len(path) > 1:
            place: Any = added
            for key in path[1:-1]:
                place = place.setdefault(key, {}) if isinstance(place, dict) else None
            if isinstance(place, dict):
                place[path[-1]] = next(iter(pieces.values()))
    return _with(tree, added) if added else tree


def with_names(tree: Tree, renamed: Mapping[str, str]) -> Tree:
    """Return an optimizer's tree with the model's names of renamed tables, as keys of state and in
    parameter groups.

    Args:
        tree: the stored tree, not changed.
        renamed: the model's table by the saved one.
    """
    longest_first = sorted(renamed.items(), key=lambda names: -len(names[0]))

    def named(text: Any) -> Any:
        for old, new in longest_first if isinstance(text, str) else ():
            if f".{text}".endswith(f".{old}.weight"):
                return f"{text.removesuffix(f'{old}.weight')}{new}.weight"
        return text

    def renewed(node: Tree) -> Tree:
        found = dict(node)
        if "d" in node:
            found["d"] = [[named(key), renewed(value)] for key, value in node["d"]]
        for kind in node.keys() & {"l", "t"}:
            found[kind] = [renewed(value) for value in node[kind]]
        if "v" in node:
            found["v"] = named(node["v"])
        return found

    return renewed(tree)


def tensor_paths(tree: Tree, path: Path) -> Iterator[Path]:
    """Yield the paths of a tree's plain tensors."""
    if "x" in tree:
        yield path
    items: Iterable[tuple[Any, Tree]] = tree.get("d") or enumerate(tree_values(tree))
    for key, node in items:
        yield from tensor_paths(node, (*path, decode_key(key) if isinstance(key, dict) else key))


def conversions(current: Any, tree: Tree | None, path: str) -> Iterator[str]:
    """Name the tensors of a live state dict that were saved as another dtype."""
    if isinstance(current, dict):
        nodes = tree_items(tree)
        for key, value in current.items():
            yield from conversions(value, nodes.get(key), f"{path}.{key}")
    elif isinstance(current, torch.Tensor) and tree is not None and "x" in tree:
        wanted = dtype_of(current)
        if wanted is not None and tree["dtype"] != dtype_name(wanted):
            yield f"{path} ({tree['dtype']}, now {dtype_name(wanted)})"


_Added = dict[str | int, Any]
"""Headers of tensors by key, nested as the containers are."""


def _with(tree: Tree, added: _Added | BlockHeader) -> Tree:
    """Return a copy of a tree with nodes for tensors; leave out tensors within a leaf."""
    if isinstance(added, BlockHeader):
        return {"x": [0, 0], "dtype": dtype_name(added.dtype), "shape": list(added.size)}
    if "d" in tree:
        items = {k: node for k, node in tree["d"] if not isinstance(k, dict)}
        new = {key: _with(items.get(key, {"d": []}), of_key) for key, of_key in added.items()}
        rest = [[k, node] for k, node in tree["d"] if isinstance(k, dict)]
        marks = {KIND: tree[KIND]} if KIND in tree else {}
        return {"d": [*([k, node] for k, node in {**items, **new}.items()), *rest], **marks}
    for letter in ("l", "t"):
        if letter in tree:
            nodes: dict[str | int, Tree] = dict(enumerate(tree[letter]))
            new = {k: _with(nodes[k], of_key) for k, of_key in added.items() if k in nodes}
            return {**tree, letter: list({**nodes, **new}.values())}
    return tree


def require_members(trees: Mapping[str, Sequence[Any]]) -> None:
    """Refuse to restore states with a member that this process lacks.

    Args:
        trees: by the state's name, all trees of it.

    Raises:
        IncompatibleCheckpoint: names the enumeration.
    """
    for name, of_state in trees.items():
        for absent in _absent_members(of_state):
            raise IncompatibleCheckpoint(
                f"state {name!r} holds {absent.kind}.{absent.member}, of an enumeration that this "
                f"process doesn't know: {_remedy(absent)}"
            )


def _remedy(absent: AbsentMember) -> str:
    if absent.module in ("__main__", "__mp_main__"):
        name = absent.kind.partition(".")[0]
        return f"the script that saved it defines it; import {name} into this one before restore()"
    if absent.module not in sys.modules:
        return f"import {absent.module} before restore()"
    return f"{absent.module} defines no such member any more; define it there again"


def _absent_members(tree: Any) -> Iterator[AbsentMember]:
    if isinstance(tree, dict):
        if tree.keys() == {MEMBER}:
            member = decode_member(tree[MEMBER])
            if isinstance(member, AbsentMember):
                yield member
            return
        tree = list(tree.values())
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        for item in tree:
            yield from _absent_members(item)
