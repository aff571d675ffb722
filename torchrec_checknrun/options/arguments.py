"""Check a Checkpointer's arguments one by one, and convert them to their final form.

A mistake found here names the argument, the expectation and an example. Found later, it would
surface at some step, in a library below, or on one rank only.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_checknrun.codecs.quantization import ALONE, Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.memory.partial import PartialRecovery
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.options.compact_after import CompactAfter
from torchrec_checknrun.restore.states import Merge
from torchrec_checknrun.root.policy import POLICIES, Consecutive, Intermittent, OneShot, Policy
from torchrec_checknrun.save.process import require_shared
from torchrec_checknrun.schedule.triggers import EverySteps
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.buffers import BUFFERS, PerRankBuffers, buffer_names

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_LONGEST_SECONDS = 1e8
"""Three years: process groups count milliseconds in 64 bits, and can't take infinity."""
_ROOT = (
    'root must be a folder or URL such as "/checkpoints/run-17" or "s3://bucket/run-17", not {!r}'
)
_ALIKE = {"delta": "has the same steps", "lc": "has the same bits"}
COPY = "copy"
LostRule = str | Callable[[Any, int], Any]
"""The rule by which a lost rank gets a state of its own, see ``PerRank``."""


class PerRank:
    """A state object that differs between ranks: each rank's own is saved.

    Attributes:
        state: the object.
        merge: function from the list of all saved state dicts, in rank order, to one rank's state
            dict. Required only to restore on another number of ranks, an error without it.
        lost: the rule by which a rank whose image is gone gets its state in a partial recovery:
            ``"copy"`` takes a surviving rank's; a function makes the state dict of the one that
            this rank has in the newest checkpoint, and the number of steps since. Without a rule
            all ranks go back to that checkpoint.
    """

    # No dataclass: hydra.utils.instantiate would make a config of it.
    def __init__(
        self, state: Stateful, merge: Merge | None = None, lost: LostRule | None = None
    ) -> None:
        if lost is not None and lost != COPY and not callable(lost):
            raise ValueError(
                f"PerRank: lost must be 'copy', a function of a state dict and a number of steps, "
                f"or None, not {lost!r}"
            )
        if merge is not None and not callable(merge):
            raise ValueError(f"PerRank: merge must be a function of a list of states, not {merge}")
        self.state = state
        self.merge = merge
        self.lost = lost


class Replicated:
    """A state object of which rank 0's content is right for all ranks: only rank 0's is saved, and
    the ranks' contents are not compared.

    Attributes:
        state: the object.
    """

    def __init__(self, state: Stateful) -> None:
        self.state = state


def require_partial(partial: object, with_images: bool) -> None:
    """Refuse anything but a partial recovery, which needs images.

    Raises:
        ValueError: it is something else, or there are no images.
    """
    if partial is None:
        return
    if not isinstance(partial, PartialRecovery):
        raise ValueError(
            "partial must be PartialRecovery(max_pls=…, total_steps=…), such as "
            f"PartialRecovery(max_pls=0.01, total_steps=100_000), or None, not {partial!r}"
        )
    if not with_images:
        raise ValueError(
            "partial recovery lets ranks whose images survived keep their rows: it needs "
            "survive=Images()"
        )


def is_timeout(seconds: object) -> TypeGuard[float]:
    """Tell whether process groups accept a timeout of so many seconds."""
    return (
        isinstance(seconds, (int, float))
        and not isinstance(seconds, bool)
        and 0 < seconds <= _LONGEST_SECONDS
    )


def require_timeout(seconds: object) -> None:
    """Refuse a timeout that process groups don't accept."""
    if not is_timeout(seconds):
        raise ValueError(
            f"timeout_seconds must be positive, up to {_LONGEST_SECONDS:g}, such as 1800, not "
            f"{seconds!r}"
        )


def require_model(model: object) -> None:
    """Refuse a model that is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a module such as DistributedModelParallel(...), not {model!r}"
        )


def require_count(name: str, value: object, least: int, expected: str) -> None:
    """Refuse a value that is no whole number of at least ``least``.

    Args:
        expected: the expectation with an example, for the error.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number{expected}, not {value!r}")


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, not {value!r}")


def as_root(root: object, timeout_seconds: float) -> Folder:
    """Return the folder of a path or URL."""
    path = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path.strip():
        raise ValueError(_ROOT.format(root))
    return Folder(path, timeout_seconds)


def as_states(state: object) -> dict[str, Stateful | PerRank | Replicated]:
    """Return the state objects by name."""
    example = 'state={"optimizer": optimizer, "reader": reader}'
    if state is None:
        return {}
    if not isinstance(state, Mapping):
        raise ValueError(f"state must map names to objects, as {example}, not {state!r:.200}")
    for name, item in state.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"names in state must be text, as in {example}, not {name!r}")
        stateful = item.state if isinstance(item, (PerRank, Replicated)) else item
        if isinstance(stateful, (PerRank, Replicated)):
            raise ValueError(f"state {name!r} is declared twice: give what it wraps, as RngState()")
        if isinstance(stateful, type) or not isinstance(stateful, Stateful):
            raise ValueError(
                f"state {name!r} is a {type(stateful).__name__} without state_dict() and "
                f"load_state_dict(): wrap it in an object that has them, as in {example}"
            )
        if name in (MODEL, BUFFERS):
            raise ValueError(f"state {name!r} has the model's own name: choose another name")
    return dict(state)


def as_buffers(patterns: Any, model: nn.Module) -> PerRankBuffers:
    """Return the model's buffers that the patterns name."""
    named = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(named, (Sequence, Mapping)) or not all(isinstance(n, str) for n in named):
        raise ValueError(
            'per_rank_buffers must be patterns over names of buffers, as "*.running_*", not '
            f"{patterns!r}"
        )
    if not patterns:
        return PerRankBuffers()
    return PerRankBuffers(patterns, buffer_names(model, model.state_dict()))


def as_policy(policy: object, with_links: bool = False) -> Policy:
    """Return a policy, the one of a name, or the default.

    Args:
        with_links: whether tables are stored as differences to the last checkpoint.
    """
    if policy is None:
        return Consecutive() if with_links else Intermittent()
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    if not _is_object(policy, "decide"):
        raise ValueError(
            f"policy must be an object such as Full() or Consecutive(), or one of "
            f"{tuple(POLICIES)}, not {policy!r}"
        )
    return policy  # type: ignore[return-value]  # it has ``decide``


def require_links(method: str, policy: Policy, background: str) -> None:
    """Refuse what can't be combined with tables stored as differences to the last checkpoint.

    Args:
        method: the one of ``Quantization`` that stores tables so.

    Raises:
        ValueError: names the remedy.
    """
    if isinstance(policy, (OneShot, Intermittent)):
        raise ValueError(
            f"quantization method={method!r} stores differences to the last checkpoint, and policy "
            f"{type(policy).__name__} saves rows since the last full one: use Consecutive(), or "
            f"method={ALONE[method]!r}, which {_ALIKE[method]} and needs no other checkpoint"
        )
    if background == "process":
        raise ValueError(
            f"quantization method={method!r} encodes rows upon what the last checkpoint restores, "
            f"and this process holds that: use background='thread', or method={ALONE[method]!r}"
        )


def as_compact_after(value: object, root: Folder) -> CompactAfter | None:
    """Return the rule for compactions, or that of a number of links, or of a share of bytes."""
    if value is None:
        return None
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            value = CompactAfter(links=value)
        elif isinstance(value, float):
            value = CompactAfter(share=value)
        elif isinstance(value, Mapping):
            value = CompactAfter(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"compact_after: {error}") from error
    if not isinstance(value, CompactAfter):
        raise ValueError(
            "compact_after must be CompactAfter(links=8), 8 links, a share of the full "
            f"checkpoint's bytes such as 0.5, or None, not {value!r}"
        )
    try:
        require_shared(root)
    except SaveFailed as error:
        raise ValueError(f"compact_after needs a root that other processes see: {error}") from error
    return value


def as_quantization(value: object) -> Quantization:
    """Return a quantization, or the one of a width, of keyword arguments, or of None (exact)."""
    if value is None:
        return Quantization()
    if isinstance(value, Quantization):
        return value
    names = [field.name for field in fields(Quantization)]
    expected = f"quantization must be Quantization(bits=8), 8 or None (exact rows), not {value!r}"
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return Quantization(bits=value)
        if isinstance(value, Mapping):
            if unknown := [name for name in value if name not in names]:
                raise ValueError(f"there is no {unknown[0]!r}, only {', '.join(names)}")
            tables = {k: as_quantization(v) for k, v in dict(value.get("tables") or {}).items()}
            return Quantization(**{**value, "tables": tables})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}: {error}") from error
    raise ValueError(expected)


def as_steps(steps: object) -> int | None:
    """Return a number of steps as an int; whole floats count."""
    if steps is None:
        return None
    try:
        if isinstance(steps, float) and steps.is_integer():
            steps = int(steps)
        if isinstance(steps, bool):
            raise TypeError
        return EverySteps(operator.index(steps)).steps  # type: ignore[arg-type]  # TypeError
    except (TypeError, ValueError):
        raise ValueError(
            "every_steps must be at least 1 step, a whole number such as 1000, or None, not "
            f"{steps!r}"
        ) from None


def as_triggers(triggers: object) -> tuple[Any, ...]:
    """Return the triggers as a tuple."""
    found = _listed("triggers", triggers, "[AtEnd()]")
    for trigger in found:
        if not _is_object(trigger, "due", "by_step"):
            raise ValueError(f"triggers must be objects such as AtEnd(), not {trigger!r}")
    return tuple(found)


def as_callbacks(callbacks: object) -> tuple[Any, ...]:
    """Return the callbacks as a tuple."""
    found = _listed("callbacks", callbacks, "[print]")
    for callback in found:
        if not callable(callback):
            raise ValueError(f"callbacks must be functions of a report, not {callback!r}")
    return tuple(found)


def _listed(name: str, values: object, example: str) -> Sequence[object]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list, as {name}={example}, not {values!r}")
    return values


def _is_object(value: object, *names: str) -> bool:
    """Tell whether a value has such attributes and is no class, which would have them as well."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def refuse_unsharded(model: nn.Module, tables: Collection[str]) -> None:
    """Refuse embedding collections of which none is sharded; warn of some that are not.

    Args:
        tables: names of the sharded tables.

    Raises:
        ValueError: names the first collection and the remedy.
    """
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    found = [
        (path or "itself", type(module).__name__)
        for path, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    if found and not tables:
        raise ValueError(
            f"model is not sharded: {found[0][0]} is a plain {found[0][1]}. Shard it first and "
            "give that, as model=DistributedModelParallel(model, device=device)"
        )
    if found:
        logger.warning(
            "not sharded, and so written in full with every checkpoint: %s",
            ", ".join(f"{path} ({kind})" for path, kind in found),
        )
