"""State objects of the user's own: each is handed what it gave when it was saved.

Shapes, keys and lengths may be others by now: a replay buffer has grown, a metric has new labels.
So nothing is compared with the object's present content, and nothing is written into that, but for
sharded tensors and tables, which are restored in place. A plain module would refuse other shapes
after the model was changed: that is found before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.state import Tree, never, tree_items

Covered = Callable[[object], bool]
Kept = Callable[[Any, Any], bool]
_MISSING = object()


class StateObjects:
    """State objects that restore themselves, by ``load_state_dict``.

    Args:
        states: by name.
    """

    def __init__(self, states: Mapping[str, object]) -> None:
        self._states = dict(states)

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def check(self, name: str, current: object, tree: Tree, covered: Covered) -> None:
        """Refuse what a plain module's own ``load_state_dict`` would refuse, and an empty state
        that the object doesn't load, since it was saved when that was disabled.

        Args:
            current: the object's present state dict.
            covered: tells leaves that are restored in place.

        Raises:
            IncompatibleCheckpoint: names the key, saved and wanted, or the object.
        """
        saved = tree_items(tree)
        if "d" in tree and not saved and (problem := self._refuses_nothing(name, current)):
            raise IncompatibleCheckpoint(
                f"state {name!r} was empty when it was saved, as that of a disabled "
                f"torch.amp.GradScaler is, and a {type(self._states[name]).__name__} that is not "
                f"refuses to load that ({problem}): restore with the object as it was, or let it "
                "keep its present state with strict=False"
            )
        if not isinstance(current, dict) or not _is_plain_module(self._states[name]):
            return
        wanted = {key: value for key, value in current.items() if not covered(value)}
        for key in [*(wanted.keys() - saved.keys()), *(saved.keys() - current.keys())]:
            where = "checkpoint" if key in saved else "module"
            raise IncompatibleCheckpoint(
                f"{name}.{key} is in the {where} only: build the module as it was when the "
                "checkpoint was saved, or skip what only one of them has with strict=False"
            )
        for key, value in wanted.items():
            shape = saved[key].get("shape") if "x" in saved[key] else None
            if isinstance(value, torch.Tensor) and shape != list(value.shape):
                raise IncompatibleCheckpoint(
                    f"{name}.{key}: the checkpoint has shape {shape}, the module wants "
                    f"{list(value.shape)}: build the module as it was when the checkpoint was "
                    "saved, or keep its own with strict=False"
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
        """Make what an object is handed: what was saved, with its live sharded tensors.

        Args:
            current: its present state dict.
            kept: tells live values that take what was saved in their place, and stay.
            covered: tells leaves that are restored in place.
            of_table: tells keys of a table, under which an optimizer keeps state that depends on
                the table's sharding: keys that only one side has stay as they are live.
            strict: whether a plain module must have just what was saved; if not, it gets what fits.
            skipped: gets what doesn't.
        """
        state = self._states[name]
        if not strict and saved == {} and self._refuses_nothing(name, current):
            skipped.append(f"state {name!r}: empty in the checkpoint")
            return current
        if not strict and isinstance(current, dict) and _is_plain_module(state):
            saved = _fitting(name, current, saved, covered, skipped)
        by_table = of_table if isinstance(state, Optimizer) else never
        return _with_live(current, saved, kept, covered, by_table)

    def _refuses_nothing(self, name: str, current: object) -> str | None:
        """Try an empty state on a copy of an object whose present one is not empty; return what
        the copy raises. Many objects take it: counts without any labels, say.
        """
        if (
            not isinstance(current, dict)
            or not current
            or isinstance(self._states[name], nn.Module)
        ):
            return None
        try:
            trial: Any = copy.deepcopy(self._states[name])
        except Exception:  # unknown: the object itself will say it
            return None
        try:
            trial.load_state_dict({})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def _with_live(current: Any, saved: Any, kept: Kept, covered: Covered, of_table: Covered) -> Any:
    """Put live leaves that were restored in place where they belong; keep the live dicts' types
    and tensors' devices.
    """
    if kept(current, saved):
        return current
    if isinstance(saved, torch.Tensor):
        if isinstance(current, torch.Tensor) and not covered(current):
            return saved.to(current.device)
        return saved
    if not isinstance(saved, dict):
        if isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)):
            beside = zip_longest(saved, current[: len(saved)])
            return type(saved)(_with_live(live, s, kept, covered, of_table) for s, live in beside)
        return saved
    if not isinstance(current, dict):
        return saved
    content = {
        key: _with_live(current.get(key), value, kept, covered, of_table)
        for key, value in saved.items()
        if key in current or not of_table(key)
    }
    for key, value in current.items():
        if key in content and not covered(value):
            continue
        live = value if of_table(key) else _live_part(value, covered)
        if live is not _MISSING:
            content[key] = live
    if type(current) is dict:
        return content
    try:
        like = copy.copy(current)  # with a module's versions, a counter's type …
        like.clear()
        like.update(content)
    except Exception:
        return content
    return like


def _live_part(value: Any, covered: Covered) -> Any:
    """What of a live value is restored in place; ``_MISSING`` if nothing is."""
    if covered(value):
        return value
    if isinstance(value, dict):
        parts = {key: _live_part(item, covered) for key, item in value.items()}
        kept = {key: part for key, part in parts.items() if part is not _MISSING}
        return kept or _MISSING
    return _MISSING


def _fitting(
    name: str,
    current: dict[Any, Any],
    saved: dict[Any, Any],
    covered: Covered,
    skipped: list[str],
) -> dict[Any, Any]:
    """What of a module's saved state it can load, and for the rest what it has."""
    skipped += [f"state {name}.{key}: only in the checkpoint" for key in saved.keys() - current]
    fitting = {}
    for key, value in current.items():
        if covered(value) and key not in saved:
            continue
        found = saved.get(key, _MISSING)
        if found is _MISSING:
            skipped.append(f"state {name}.{key}: only in the module")
        elif isinstance(value, torch.Tensor) and getattr(found, "shape", None) != value.shape:
            skipped.append(f"state {name}.{key}: of another shape than the module's")
            found = _MISSING
        fitting[key] = value if found is _MISSING else found
    return fitting


def _is_plain_module(state: object) -> bool:
    """Whether a module loads its state as torch's own modules do, so that it refuses other keys and
    shapes.
    """
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
