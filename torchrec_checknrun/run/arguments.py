"""Validate what a Checkpointer is made with, before anything is made of it.

A mistake found here names the argument, the expectation and an example; later it would surface at
some step, in a library below, or on one rank only.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.dense.buffers import BUFFERS, PerRankBuffers, buffer_names
from torchrec_checknrun.model.state_dict import MODEL
from torchrec_checknrun.restore.states import Merge
from torchrec_checknrun.root.policy import POLICIES, Intermittent, Policy
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.run.triggers import EverySteps, Trigger
from torchrec_checknrun.save.background import BackgroundKind
from torchrec_checknrun.save.staging import StagingMode
from torchrec_checknrun.store.folder import Folder

Resume = Literal["auto", "must", "never"]
"""What ``restore()`` does: take the newest chain if there is one, insist on one, or start anew."""

_LONGEST_SECONDS = 1e8
"""Three years: process groups count milliseconds, and can't count to infinity."""
_ONLY_HYDRA = {
    **dict.fromkeys(("bits", "method", "mean_bits", "offset"), "quantization=Quantization(bits=8)"),
    **dict.fromkeys(("compress", "exact_below_rows"), "quantization=Quantization(compress=True)"),
    "expected_restores": 'quantization=Quantization(bits="auto", expected_restores=3)',
    "optimizer_state": 'quantization=Quantization(bits=8, optimizer="log8")',
    "tables": 'quantization=Quantization(tables={"*user*": Quantization(bits=4)})',
    "every_seconds": "triggers=[EverySeconds(600)]",
    "at_end": "triggers=[AtEnd()]",
    **dict.fromkeys(("on_sigterm", "grace_seconds"), "triggers=[OnSigterm(grace_seconds=25)]"),
    **dict.fromkeys(("keep", "keep_every_hours"), "retention=Retention(keep=2, every_hours=6)"),
    "asynchronous": 'background="thread", which is the default',
}
"""Keys of the Hydra group ``checkpoint``, and how Python says the same."""


@dataclass(frozen=True)
class Arguments:
    """A Checkpointer's arguments, checked and in their final form.

    Attributes are those of ``Checkpointer``.
    """

    root: Folder
    state: Mapping[str, Stateful | PerRank | Replicated]
    per_rank_buffers: PerRankBuffers
    policy: Policy
    quantization: Quantization
    every_steps: int | None
    triggers: tuple[Trigger, ...]
    background: BackgroundKind
    staging: StagingMode
    when_busy: Literal["skip", "wait"]
    max_failures: int
    retention: Retention | None
    resume: Resume
    timeout_seconds: float
    chunk_bytes: int

    @classmethod
    def checked(
        cls,
        root: object,
        *,
        model: object,
        state: object,
        per_rank_buffers: Any,
        policy: object,
        quantization: object,
        every_steps: object,
        triggers: object,
        background: Any,
        staging: Any,
        when_busy: Any,
        max_failures: Any,
        retention: Any,
        callbacks: object,
        resume: Any,
        timeout_seconds: Any,
        chunk_bytes: Any,
        unknown: Mapping[str, object],
    ) -> Arguments:
        """Return the arguments as ``Checkpointer`` was given them, in their final form.

        Args:
            unknown: keyword arguments that Checkpointer doesn't have.

        Raises:
            ValueError, TypeError: an argument is not as expected; names it and gives an example.
        """
        _refuse_unknown(unknown)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be a module such as DistributedModelParallel(...), not {model!r}"
            )
        if not _is_count(chunk_bytes, 1):
            raise ValueError(
                f"chunk_bytes must be a whole number of bytes such as 32 << 20, not {chunk_bytes!r}"
            )
        if not _is_count(max_failures, 0):
            raise ValueError(
                f"max_failures must be a whole number, 0 or more, such as 2, not {max_failures!r}"
            )
        if not is_timeout(timeout_seconds):
            raise ValueError(
                f"timeout_seconds must be positive, up to {_LONGEST_SECONDS:g}, such as 1800, not "
                f"{timeout_seconds!r}"
            )
        for name, value, choices in (
            ("background", background, get_args(BackgroundKind)),
            ("staging", staging, get_args(StagingMode)),
            ("when_busy", when_busy, ("skip", "wait")),
            ("resume", resume, get_args(Resume)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, not {value!r}")
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(
                "retention must be Retention(keep=...), such as Retention(keep=2), or None, not "
                f"{retention!r}"
            )
        for callback in _listed("callbacks", callbacks, "[print]"):
            if not callable(callback):
                raise ValueError(f"callbacks must be functions of a report, not {callback!r}")
        return cls(
            root=_as_root(root, timeout_seconds),
            state=_as_states(state),
            per_rank_buffers=_as_buffers(per_rank_buffers, model),
            policy=_as_policy(policy),
            quantization=_as_quantization(quantization),
            every_steps=_as_steps(every_steps),
            triggers=tuple(_as_triggers(triggers)),
            background=background,
            staging=staging,
            when_busy=when_busy,
            max_failures=max_failures,
            retention=retention,
            resume=resume,
            timeout_seconds=timeout_seconds,
            chunk_bytes=chunk_bytes,
        )

    @property
    def states(self) -> dict[str, Stateful]:
        """The state objects themselves, without what they are declared to be."""
        return {
            name: item.state if isinstance(item, (PerRank, Replicated)) else item
            for name, item in self.state.items()
        }

    def described(self) -> dict[str, str]:
        """Describe everything that all ranks must have alike, by argument, for a comparison.

        Objects of users' own classes that are no dataclasses are described by their class alone:
        what else they hold may differ between ranks.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        states: Mapping[str, object] = values.pop("state")
        kinds = {name: _kind(state) for name, state in states.items()}
        return {
            **{name: _describe(value) for name, value in values.items()},
            **{f"state[{name!r}]": kind for name, kind in kinds.items()},
        }


def is_timeout(seconds: object) -> bool:
    """Tell whether process groups can wait for so many seconds."""
    return (
        isinstance(seconds, (int, float))
        and not isinstance(seconds, bool)
        and 0 < seconds <= _LONGEST_SECONDS
    )


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name, value in unknown.items():
        if name in _ONLY_HYDRA:
            raise TypeError(
                f"{name} is a key of the Hydra group `checkpoint`; Checkpointer has no such "
                f"argument: give {_ONLY_HYDRA[name]}, not {name}={value!r}"
            )
        raise TypeError(
            f"Checkpointer has no argument {name!r}: see help(Checkpointer) for those it has, such "
            "as every_steps=1000"
        )


def _as_root(root: object, timeout_seconds: float) -> Folder:
    if isinstance(root, bytes) or not isinstance(root, (str, os.PathLike)):
        raise ValueError(_ROOT.format(root))
    if not str(os.fspath(root)).strip():
        raise ValueError(_ROOT.format(root))
    return Folder(root, timeout_seconds)


_ROOT = (
    'root must be a folder or URL such as "/checkpoints/run-17" or "s3://bucket/run-17", not {!r}'
)


def _as_states(state: object) -> dict[str, Stateful | PerRank | Replicated]:
    example = 'state={"optimizer": optimizer, "reader": reader}'
    if state is None:
        return {}
    if not isinstance(state, Mapping):
        raise ValueError(f"state must map names to objects, as {example}, not {state!r:.200}")
    for name, item in state.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"names in state must be text, as in {example}, not {name!r}")
        stateful = getattr(item, "state", None) if _is_declared(item) else item
        if isinstance(stateful, type) or not isinstance(stateful, Stateful):
            raise ValueError(
                f"state {name!r} is a {type(stateful).__name__} without state_dict() and "
                f"load_state_dict(): wrap it in an object that has them, as in {example}"
            )
        if name in (MODEL, BUFFERS):
            raise ValueError(f"state may not be called {name!r}: that is the model's own name")
    return dict(state)


def _as_buffers(patterns: Any, model: nn.Module) -> PerRankBuffers:
    if not isinstance(patterns, (str, Sequence, Mapping)):
        raise ValueError(
            'per_rank_buffers must be patterns over names of buffers, as "*.running_*", not '
            f"{patterns!r}"
        )
    if not patterns:
        return PerRankBuffers()
    return PerRankBuffers(patterns, buffer_names(model, model.state_dict()))


def _as_policy(policy: object) -> Policy:
    if policy is None:
        return Intermittent()
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    if not _is_object(policy, "decide"):
        raise ValueError(
            f"policy must be an object such as Full() or Consecutive(), or one of "
            f"{tuple(POLICIES)}, not {policy!r}"
        )
    return policy  # type: ignore[return-value]  # it has ``decide``


def _as_quantization(value: object) -> Quantization:
    """Return the quantization that a width or the arguments of one stand for."""
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
                raise ValueError(f"it has no {unknown[0]!r}, but {', '.join(names)}")
            tables = {k: _as_quantization(v) for k, v in dict(value.get("tables") or {}).items()}
            return Quantization(**{**value, "tables": tables})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}: {error}") from error
    raise ValueError(expected)


def _as_steps(steps: object) -> int | None:
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
            "every_steps must be at least 1 step, in whole ones, such as 1000, or None, not "
            f"{steps!r}"
        ) from None


def _as_triggers(triggers: object) -> list[Any]:
    found = _listed("triggers", triggers, "[AtEnd()]")
    for trigger in found:
        if not _is_object(trigger, "due", "by_step"):
            raise ValueError(f"triggers must be objects such as AtEnd(), not {trigger!r}")
    return list(found)


def _listed(name: str, values: object, example: str) -> Sequence[object]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list, as {name}={example}, not {values!r}")
    return values


def _is_declared(item: object) -> bool:
    return isinstance(item, (PerRank, Replicated))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_object(value: object, *names: str) -> bool:
    """Tell whether a value has such attributes and is no class, which would have them as well."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _kind(state: object) -> str:
    if not _is_declared(state):
        return "given"
    merged = getattr(state, "merge", None) is not None
    return f"{type(state).__name__}({'with merge' if merged else ''})"


def _describe(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (Folder, PerRankBuffers)):
        return str(value)
    if isinstance(value, Mapping):
        items = sorted((repr(key), _describe(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    # A dataclass, which mypy does not infer from the attribute.
    parts = fields(value) if hasattr(value, "__dataclass_fields__") else ()  # type: ignore[arg-type]
    inside = ", ".join(f"{part.name}={_describe(getattr(value, part.name))}" for part in parts)
    return f"{type(value).__qualname__}({inside})"


class PerRank:
    """Declares that a state object differs between ranks: each rank's own is saved.

    Attributes:
        state: the object.
        merge: makes one rank's state dict of the list of all that were saved, in rank order; needed
            only to restore on another number of ranks, which is an error without it.
    """

    # No dataclass: hydra.utils.instantiate would make a config of it.
    def __init__(self, state: Stateful, merge: Merge | None = None) -> None:
        self.state = state
        self.merge = merge


class Replicated:
    """Declares that rank 0's content of a state object is right for all ranks: only that is saved,
    and the ranks' contents are not compared.

    Attributes:
        state: the object.
    """

    def __init__(self, state: Stateful) -> None:
        self.state = state
