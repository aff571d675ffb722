"""Hold a Checkpointer's arguments in their final form: checked, and comparable between ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchrec_checknrun.codecs import Codec
from torchrec_checknrun.codecs.quantization import Quantization
from torchrec_checknrun.memory.images import HostCopies, Images
from torchrec_checknrun.memory.partial import PartialRecovery
from torchrec_checknrun.options import arguments
from torchrec_checknrun.options.arguments import PerRank, Replicated
from torchrec_checknrun.options.compact_after import CompactAfter
from torchrec_checknrun.options.publish import Publish
from torchrec_checknrun.options.unknown import refuse_unknown
from torchrec_checknrun.root.policy import Policy
from torchrec_checknrun.root.report import CheckpointReport
from torchrec_checknrun.root.retention import Retention
from torchrec_checknrun.save.background import BackgroundKind
from torchrec_checknrun.save.parent_content import DenseForm
from torchrec_checknrun.schedule.triggers import EverySteps, Trigger
from torchrec_checknrun.snapshot.encoded_at_cut import StagingMode
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.values.buffers import PerRankBuffers

Callback = Callable[[CheckpointReport], None]
Resume = Literal["auto", "must", "never"]
"""The choice of ``restore()``: the newest chain if there is one, the newest chain or an error, or a
fresh start.
"""
WhenBusy = Literal["skip", "wait"]

_CHOICES = {
    "background": get_args(BackgroundKind),
    "staging": get_args(StagingMode),
    "when_busy": get_args(WhenBusy),
    "resume": get_args(Resume),
    "dense": get_args(DenseForm),
}
_OF_ONE_RANK = ("model", "memory_budget", "callbacks")
"""Not compared between ranks: the models' tables are compared once they are tracked."""


@dataclass(frozen=True, eq=False)
class Options:
    """A Checkpointer's arguments, checked and in their final form.

    Made of the arguments as ``Checkpointer`` was given them. The attributes are those arguments:
    ``root`` as a folder, ``policy``, ``quantization`` and ``per_rank_buffers`` as objects,
    ``triggers`` and ``callbacks`` as tuples, ``state`` as a dict. ``memory_budget`` is checked by
    ``Background``.

    Raises:
        ValueError: an argument is out of range or of another kind; names it, with an example.
    """

    root: Folder
    model: nn.Module
    state: Mapping[str, Stateful | PerRank | Replicated]
    per_rank_buffers: PerRankBuffers
    policy: Policy
    quantization: Quantization
    every_steps: int | None
    triggers: tuple[Trigger, ...]
    background: BackgroundKind
    staging: StagingMode
    memory_budget: int | None
    when_busy: WhenBusy
    max_failures: int
    retention: Retention | None
    callbacks: tuple[Callback, ...]
    resume: Resume
    timeout_seconds: float
    chunk_bytes: int
    survive: Images | HostCopies | None = None
    partial: PartialRecovery | None = None
    compact_after: CompactAfter | None = None
    dense: DenseForm = "difference"
    publish: Publish | None = None

    def __post_init__(self) -> None:
        arguments.require_model(self.model)
        arguments.require_count("chunk_bytes", self.chunk_bytes, 1, " of bytes such as 32 << 20")
        arguments.require_count("max_failures", self.max_failures, 0, ", 0 or more, such as 2")
        arguments.require_timeout(self.timeout_seconds)
        for name, choices in _CHOICES.items():
            arguments.require_choice(name, getattr(self, name), choices)
        retention: object = self.retention
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(
                "retention must be Retention(keep=...), such as Retention(keep=2), or None, not "
                f"{retention!r}"
            )
        survive: object = self.survive
        if survive is not None and not isinstance(survive, (Images, HostCopies)):
            raise ValueError(f"survive must be Images(), HostCopies() or None, not {survive!r}")
        publish: object = self.publish
        if publish is not None and not isinstance(publish, Publish):
            raise ValueError(
                'publish must be Publish(root=…), such as Publish(root="s3://bucket/serve"), or '
                f"None, not {publish!r}"
            )
        arguments.require_partial(self.partial, with_images=isinstance(survive, Images))
        self._set("callbacks", arguments.as_callbacks(self.callbacks))
        self._set("root", arguments.as_root(self.root, self.timeout_seconds))
        self._set("compact_after", arguments.as_compact_after(self.compact_after, self.root))
        self._set("state", arguments.as_states(self.state))
        self._set("per_rank_buffers", arguments.as_buffers(self.per_rank_buffers, self.model))
        self._set("quantization", arguments.as_quantization(self.quantization))
        self._set(
            "policy", arguments.as_policy(self.policy, self.quantization.link_method is not None)
        )
        if (method := self.quantization.link_method) is not None:
            arguments.require_links(method, self.policy, self.background)
        self._set("every_steps", arguments.as_steps(self.every_steps))
        self._set("triggers", arguments.as_triggers(self.triggers))

    @classmethod
    def of(cls, given: Mapping[str, Any], unknown: Mapping[str, object]) -> Options:
        """Return the options of Checkpointer's arguments.

        Args:
            given: all arguments that Checkpointer has, by name.
            unknown: other keyword arguments, which are refused.

        Raises:
            TypeError: an argument is unknown.
            ValueError: as the constructor.
        """
        refuse_unknown(unknown, given)
        return cls(**given)

    def storing(self, quantization: Quantization) -> Options:
        """Return these options with another quantization."""
        found = copy.copy(self)
        found._set("quantization", quantization)
        return found

    def without_buffers(self, names: Collection[str]) -> Options:
        """Return these options with the buffers of the names stored with the model."""
        found = copy.copy(self)
        found._set("per_rank_buffers", self.per_rank_buffers.without(names))
        return found

    @property
    def states(self) -> dict[str, Stateful]:
        """Return the state objects themselves, without their declaration."""
        return {
            name: item.state if isinstance(item, (PerRank, Replicated)) else item
            for name, item in self.state.items()
        }

    @property
    def all_triggers(self) -> tuple[Trigger, ...]:
        """Return the triggers, ``every_steps`` included."""
        steps = () if self.every_steps is None else (EverySteps(self.every_steps),)
        return (*steps, *self.triggers)

    def described(self) -> dict[str, str]:
        """Describe, by argument, everything that must be the same on all ranks.

        Objects of users' own classes that are no dataclasses are described by their class alone:
        their content may differ between ranks.
        """
        names = [field.name for field in fields(self) if field.name not in _OF_ONE_RANK]
        values = {name: getattr(self, name) for name in names}
        states: Mapping[str, object] = values.pop("state")
        return {
            **{name: _describe(value) for name, value in values.items()},
            **{f"state[{name!r}]": _declaration(item) for name, item in states.items()},
        }

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the one way into a frozen dataclass


def _declaration(state: object) -> str:
    if not isinstance(state, (PerRank, Replicated)):
        return "given"
    merged = isinstance(state, PerRank) and state.merge is not None
    rule = getattr(state, "lost", None)
    parts = ["with merge"] if merged else []
    parts += [] if rule is None else ["lost=copy" if rule == arguments.COPY else "lost=function"]
    return f"{type(state).__name__}({', '.join(parts)})"


def _describe(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, PerRankBuffers):
        return value.patterns  # the names that match differ where ranks have buffers of their own
    if isinstance(value, (Folder, os.PathLike)):
        return str(value)
    if isinstance(value, Codec):
        return repr(value)  # of its spec, by which chunks are read
    if isinstance(value, Mapping):
        items = sorted((repr(key), _describe(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    parts = fields(value) if hasattr(value, "__dataclass_fields__") else ()  # type: ignore[arg-type]  # proven
    inside = ", ".join(f"{part.name}={_describe(getattr(value, part.name))}" for part in parts)
    return f"{type(value).__qualname__}({inside})"
