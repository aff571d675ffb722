"""Restore users' state objects through ``load_state_dict``, with the content that was saved.

Shapes, keys and lengths may differ by now: a replay buffer has grown, a metric has new labels. So
the object's present content is neither compared nor written to, except for sharded tensors and
tables, which are restored in place. A plain module would refuse other shapes only after the model
was changed, so that is checked before.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrec_checknrun.dense.tree import attributes
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.placements import laid_out_as
from torchrec_checknrun.values.dicts import like
from torchrec_checknrun.values.state import Tree, tree_items, tree_values

Covered = Callable[[object], bool]
"""Returns whether a leaf is restored in place, or whether a key belongs to a table."""
Kept = Callable[[Any, Any], bool]
"""Returns whether a live value, the first argument, is used in place of the saved one."""
_LISTS = (list, tuple, deque)
_MISSING = object()


class StateObjects:
    """State objects that are restored by their own ``load_state_dict``.

    Args:
        states: the objects by name.
    """

    def __init__(self, states: Mapping[str, object]) -> None:
        self._states = dict(states)

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def needs_present(self, name: str, trees: Collection[Tree]) -> bool:
        """Return whether an object's present state dict is needed to restore what was saved.

        Some objects get ready for a start when they are asked for it, and then pass over what
        ``load_state_dict`` gives them: torchdata's ``Loader`` would begin its data anew. Others
        talk to the other ranks then, which must ask as well.

        Args:
            trees: the saved ones, of all ranks.
        """
        if isinstance(self._states[name], (nn.Module, Optimizer)):
            return True
        return not (trees and all(map(_is_enough, trees)))

    def present(self, name: str, trees: Collection[Tree], needed: bool) -> Any:
        """Return an object's present state dict; an empty one if it isn't ``needed``, on another
        rank or here.
        """
        state: Any = self._states[name]
        return state.state_dict() if needed or self.needs_present(name, trees) else {}

    def check(self, name: str, current: object, tree: Tree, covered: Covered) -> None:
        """Refuse content that the object's ``load_state_dict`` would refuse.

        That is another module's keys or shapes, for a plain module; and an empty state, which a
        disabled object saves, for an object that doesn't load one.

        Args:
            name: the object's name.
            current: the object's present state dict.
            tree: the saved tree.
            covered: recognizes leaves that are restored in place.

        Raises:
            IncompatibleCheckpoint: names the key, saved and wanted, or the object.
        """
        saved = tree_items(tree)
        if "d" in tree and not saved and (problem := self._refuses_nothing(name, current)):
            raise IncompatibleCheckpoint(
                f"state {name!r} was empty when it was saved, as a disabled torch.amp.GradScaler's "
                f"is, and an enabled {type(self._states[name]).__name__} refuses to load that "
                f"({problem}): restore with the object as it was, or let it keep its present state "
                "with strict=False"
            )
        if not isinstance(current, dict) or not _is_plain_module(self._states[name]):
            return
        shapes = {key: node.get("shape") if "x" in node else None for key, node in saved.items()}
        for key, problem in _misfits(current, shapes, covered):
            if not covered(current.get(key)):
                raise IncompatibleCheckpoint(
                    f"{name}.{key} is {problem}: build the module as it was when the checkpoint "
                    "was saved, or restore only what fits with strict=False"
                )

    def content(
        self,
        name: str,
        current: Any,
        saved: Any,
        kept: Kept,
        covered: Covered,
        of_table: Covered,
        strict: bool,
        skipped: list[str],
    ) -> Any:
        """Build the state dict to load: the saved content with the live sharded tensors.

        Args:
            name, current, covered: as for ``check``.
            saved: the saved content.
            kept: recognizes live values that are used in place of the saved ones.
            of_table: recognizes keys of a table, under which an optimizer keeps state that depends
                on the sharding: such keys on one side only keep their live content.
            strict: whether a plain module must match the saved content exactly; if not, only the
                matching part is loaded.
            skipped: receives a description of each part left out.
        """
        state = self._states[name]
        if not strict and saved == {} and self._refuses_nothing(name, current):
            skipped.append(f"state {name!r}: empty in the checkpoint")
            return current
        if not strict and isinstance(current, dict) and _is_plain_module(state):
            shapes = {k: list(v.shape) if isinstance(v, Tensor) else None for k, v in saved.items()}
            misfits = dict(_misfits(current, shapes, covered))
            skipped += [f"state {name}.{key}: {problem}" for key, problem in misfits.items()]
            saved = {
                key: live if key in misfits else saved[key]
                for key, live in current.items()
                if key in saved or key in misfits
            }
        live = _Live(kept, covered, of_table, isinstance(state, Optimizer))
        return live.merged(current, saved)

    def _refuses_nothing(self, name: str, current: object) -> str | None:
        """Load an empty state into a copy of an object whose state is not empty.

        Many objects accept one: counts without any labels, say.

        Returns:
            The copy's error as text; None if there is none, or if the object can't be copied.
        """
        if (
            not isinstance(current, dict)
            or not current
            or isinstance(self._states[name], nn.Module)
        ):
            return None
        try:
            trial: Any = copy.deepcopy(self._states[name])
        except Exception:  # unknown: the object itself will raise if it refuses
            return None
        try:
            trial.load_state_dict({})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


@dataclass(frozen=True)
class _Live:
    """A merge of saved content with the live leaves that are restored in place.

    Attributes:
        kept, covered, of_table: as for ``StateObjects.content``.
        by_table: whether keys of a table on one side only keep their live content.
    """

    kept: Kept
    covered: Covered
    of_table: Covered
    by_table: bool

    def merged(self, current: Any, saved: Any) -> Any:
        """Return the saved content with the live leaves.

        Dicts keep the live ones' types unless these are plain, tensors the live ones' devices,
        whether they take gradients, and their order in memory unless the saved one is not
        row-major.
        """
        if self.kept(current, saved):
            return current
        if isinstance(saved, Tensor):
            if isinstance(current, Tensor) and not self.covered(current):
                return _as_live(saved, current)
            return saved
        if not isinstance(saved, dict):
            if isinstance(saved, _LISTS) and isinstance(current, _LISTS):
                pairs = zip_longest(saved, islice(current, len(saved)))
                items = [self.merged(live, item) for item, live in pairs]
                return deque(items, saved.maxlen) if type(saved) is deque else type(saved)(items)
            return saved
        if not isinstance(current, dict):
            return saved
        content = {
            key: self.merged(current.get(key), value)
            for key, value in saved.items()
            if key in current or not (self.by_table and self.of_table(key))
        }
        for key, value in current.items():
            if key in content and not self.covered(value):
                continue
            live = value if self.by_table and self.of_table(key) else self._part(key, value)
            if live is not _MISSING:
                content[key] = live
        if type(current) is dict:
            return content if type(saved) is dict else like(saved, content)
        try:
            same = copy.copy(current)  # keeps a module's versions, a type of the user's own …
            same.clear()
            same.update(content)
        except Exception:
            return content
        return same

    def _part(self, key: object, value: Any) -> Any:
        """Return the part of a live value that is restored in place; ``_MISSING`` if none is.

        An empty dict under a table's key is such a part: no checkpoint holds it, and it is what a
        fused SGD shows for each table of this rank.
        """
        if self.covered(value):
            return value
        if isinstance(value, dict):
            if not value and self.of_table(key):
                return value
            parts = {inner: self._part(inner, item) for inner, item in value.items()}
            kept = {inner: part for inner, part in parts.items() if part is not _MISSING}
            return kept or _MISSING
        return _MISSING


def _as_live(saved: Tensor, current: Tensor) -> Tensor:
    """Return a saved tensor as ``merged`` does, beside the live one."""
    placed = saved.to(current.device)
    if saved.is_contiguous():
        placed = laid_out_as(placed, current)
    return placed.requires_grad_(current.requires_grad and placed.is_floating_point())


def _is_enough(tree: Tree) -> bool:
    """Return whether a saved tree is all that an object's ``load_state_dict`` needs.

    The live tensors' device counts where there are others than the CPU. An empty state may be one
    that the object refuses.
    """
    if not tree.get("whole") or not tree["d"]:
        return False
    return not torch.accelerator.is_available() or not _has_tensors(tree)


def _has_tensors(tree: Tree) -> bool:
    inner = (*tree_items(tree).values(), *tree_values(tree))
    return "x" in tree or any(map(_has_tensors, inner))


def _misfits(
    current: Mapping[Any, Any], shapes: Mapping[Any, list[int] | None], covered: Covered
) -> Iterator[tuple[Any, str]]:
    """Yield the keys at which a module refuses a saved state, each with the reason.

    Args:
        shapes: by key, of the saved tensors; None for other saved values.
    """
    for key, value in current.items():
        if key not in shapes:
            if not covered(value):
                yield key, "in the module only"
        elif isinstance(value, Tensor) and (shape := shapes[key]) != list(value.shape):
            found = "no tensor" if shape is None else shape
            yield key, f"{found} in the checkpoint and {list(value.shape)} in the module"
    for key in shapes.keys() - current.keys():
        yield key, "in the checkpoint only"


def _is_plain_module(state: object) -> bool:
    """Return whether a module loads as torch's own do, and so refuses other keys and shapes."""
    return (
        isinstance(state, nn.Module)
        and type(state).load_state_dict is nn.Module.load_state_dict
        and all(_loads_plainly(module) for module in state.modules())
    )


def _loads_plainly(module: nn.Module) -> bool:
    load: Any = type(module)._load_from_state_dict
    extra = type(module).set_extra_state is not nn.Module.set_extra_state
    return (
        load.__module__.startswith("torch.nn.modules.")
        and not module._load_state_dict_pre_hooks
        and not extra
    )


def keeps_all_to_itself(state: object) -> bool:
    """Return whether a module keeps tensors, and none of them is in its state dict: a metric's."""
    if not isinstance(state, nn.Module) or next(state.parameters(), None) is not None:
        return False
    held = (chain(vars(m).values(), m._buffers.values()) for m in state.modules())
    keeps = any(isinstance(value, Tensor) for value in chain.from_iterable(held))
    return keeps and not state.state_dict()


def shows_sums(objects: Collection[object]) -> bool:
    """Return whether a module counts on each rank, shows sums over the ranks, and is given alone.

    TorchRec's ``CPUOffloadedRecMetricModule`` does: its own counts are those of ``rec_metrics``.
    """
    given = {id(each) for each in objects}
    modules = (m for each in objects if isinstance(each, nn.Module) for m in each.modules())
    # By name: without metrics a program need not wait for their import.
    return any(
        cls.__name__ == "CPUOffloadedRecMetricModule" and id(module.rec_metrics) not in given
        for module in modules
        for cls in type(module).__mro__
    )


def holds_loader(state: object) -> bool:
    """Return whether a state object is, or has as an attribute, a loader of torchdata's.

    Asked for its state right after that was loaded, such a loader with worker processes begins its
    iteration: with the sampler as it is then, before the program has called ``set_epoch``.
    """
    kinds = {type(value) for value in (state, *attributes(state).values())}
    return any(each.__module__.startswith("torchdata.") for kind in kinds for each in kind.__mro__)
