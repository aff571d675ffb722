"""What a Checkpointer is made with, checked before anything is made of it: else a mistake would be
told at a later step, by a library below, or on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.background import BackgroundKind
from torchrec_checknrun.per_rank import PerRank, Replicated
from torchrec_checknrun.per_rank_buffers import BUFFERS
from torchrec_checknrun.retention import Retention
from torchrec_checknrun.snapshot import MODEL
from torchrec_checknrun.staging import StagingMode

_LONGEST_SECONDS = 1e8
"""Three years: process groups count milliseconds, and can't count to infinity."""


def check_arguments(
    state: Mapping[str, object],
    *,
    policy: object,
    triggers: object,
    background: str,
    staging: str,
    when_busy: str,
    max_failures: int,
    retention: object,
    callbacks: object,
    timeout_seconds: float,
    chunk_bytes: int,
) -> None:
    """Arguments as of ``Checkpointer``.

    Raises:
        ValueError: one is not what it should be; names it.
    """
    for name in (MODEL, BUFFERS):
        if name in state:
            raise ValueError(f"state may not be called {name!r}: that is the model's own name")
    for name, item in state.items():
        stateful = item.state if isinstance(item, (PerRank, Replicated)) else item
        if not isinstance(stateful, Stateful):
            raise ValueError(
                f"state {name!r} is a {type(stateful).__name__} without state_dict() and "
                "load_state_dict(): wrap it in an object that has them"
            )
    if not (isinstance(chunk_bytes, int) and chunk_bytes > 0):
        raise ValueError(
            f"chunk_bytes must be a whole number of bytes such as 32 << 20, not {chunk_bytes!r}"
        )
    if not (isinstance(max_failures, int) and max_failures >= 0):
        raise ValueError(f"max_failures must be a whole number, 0 or more, not {max_failures!r}")
    if not (isinstance(timeout_seconds, (int, float)) and 0 < timeout_seconds <= _LONGEST_SECONDS):
        raise ValueError(
            f"timeout_seconds must be positive, up to {_LONGEST_SECONDS:g}, not {timeout_seconds!r}"
        )
    for name, value, choices in (
        ("background", background, get_args(BackgroundKind)),
        ("staging", staging, get_args(StagingMode)),
        ("when_busy", when_busy, ("skip", "wait")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, not {value!r}")
    if policy is not None and not _is_object(policy, "decide"):
        raise ValueError(f"policy must be an object such as Full(), not {policy!r}")
    for trigger in _listed("triggers", triggers):
        if not _is_object(trigger, "due", "by_step"):
            raise ValueError(f"triggers must be objects such as AtEnd(), not {trigger!r}")
    if retention is not None and not isinstance(retention, Retention):
        raise ValueError(f"retention must be Retention(keep=...) or None, not {retention!r}")
    for callback in _listed("callbacks", callbacks):
        if not callable(callback):
            raise ValueError(f"callbacks must be functions of a report, not {callback!r}")


def _is_object(value: object, *names: str) -> bool:
    """Whether it has such attributes and is no class, which would have them as well."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _listed(name: str, values: object) -> Sequence[object]:
    if not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list, not {values!r}")
    return values
