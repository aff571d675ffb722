"""Define the Hydra group ``checkpoint``: one switch between this package, stock DCP and nothing.

An app with this package installed writes ``checkpoint: check_n_run`` into its defaults, and calls
``hydra.utils.instantiate(cfg.checkpoint, model=…, state=…)`` once it has the model: every choice
has the same methods. The configs are structured: a misspelt key fails at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, EnumNode, OmegaConf
from omegaconf.errors import ValidationError
from omegaconf.nodes import AnyNode

if TYPE_CHECKING:
    from torch import nn

    from torchrec_checknrun.codecs.quantization import Quantization
    from torchrec_checknrun.dense.buffers import Patterns
    from torchrec_checknrun.hydra_config.baselines import DcpCheckpointer, NoCheckpointer
    from torchrec_checknrun.memory.partial import PartialRecovery
    from torchrec_checknrun.root.policy import Policy
    from torchrec_checknrun.root.report import CheckpointReport
    from torchrec_checknrun.root.retention import Retention
    from torchrec_checknrun.run.checkpointer import Checkpointer
    from torchrec_checknrun.options.compact_after import CompactAfter
    from torchrec_checknrun.options.publish import Publish
    from torchrec_checknrun.schedule.triggers import Trigger

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")
GROUP = "checkpoint"


class PolicyName(Enum):
    """The policies that need no parameters, as spelled in a config."""

    full = "full"
    one_shot = "one_shot"
    consecutive = "consecutive"
    intermittent = "intermittent"


Resume = Enum("Resume", {"auto": "auto", "must": "must", "never": "never"})
"""The default of ``restore()``; see ``Checkpointer``."""
Background = Enum("Background", {"thread": "thread", "process": "process"})
Staging = Enum(
    "Staging",
    {"copy_on_write": "copy_on_write", "auto": "auto", "copy": "copy", "encode": "encode"},
)
WhenBusy = Enum("WhenBusy", {"skip": "skip", "wait": "wait"})
Bits = Enum("Bits", {"auto": "auto", "2": 2, "3": 3, "4": 4, "8": 8})
"""Widths as spelled in a config; null for exact rows."""
PublishBits = Enum("PublishBits", {"2": 2, "4": 4, "8": 8, "32": 32})


@dataclass
class TableConfig:
    """The quantization of the tables that a pattern matches; see ``Quantization``."""

    bits: Bits | None = None
    method: str = "adaptive"
    mean_bits: float | None = None
    offset: float | None = None
    step: float | None = None
    loss: float | None = None
    current_loss: float | None = None
    trained_steps: int | None = None  # ``Quantization(total_steps=…)``
    batch_size: int | None = None
    tail: bool = False
    optimizer_state: str = "fp32"
    compress: bool = False
    codec: Any = None  # ``{_target_: my.Codec, ...}``, in place of bits and method


@dataclass
class CheckNRunConfig:
    """The choice ``checkpoint: check_n_run``: the arguments of ``Checkpointer`` as plain values.

    The arguments of its ``Quantization``, triggers and ``Retention`` are keys here, too.
    """

    _target_: str = "torchrec_checknrun.hydra_config.config.make_check_n_run"
    _convert_: str = "partial"  # lists of objects stay lists of these very objects
    root: str = MISSING
    every_steps: int | None = 1000
    policy: Any = PolicyName.intermittent  # a ``PolicyName``, or ``{_target_: my.Policy, ...}``
    bits: Bits | None = None
    method: str = "adaptive"
    expected_restores: float | None = None
    mean_bits: float | None = None
    offset: float | None = None
    step: float | None = None  # with method delta or fisher, as the next six
    loss: float | None = None
    current_loss: float | None = None
    trained_steps: int | None = None  # ``Quantization(total_steps=…)``
    batch_size: int | None = None
    tail: bool = False
    reference_bytes: int | None = None
    optimizer_state: str = "fp32"
    compress: bool = False
    exact_below_rows: int = 1000
    codec: Any = None  # ``{_target_: my.Codec, ...}``, in place of bits and method
    tables: dict[str, TableConfig] = field(default_factory=dict)
    triggers: list[Any] = field(default_factory=list)  # ``{_target_: my.Trigger, ...}`` each
    every_seconds: float | None = None
    at_end: bool = False
    on_sigterm: bool = False
    grace_seconds: float = 25.0
    background: Background = Background.thread
    staging: Staging = Staging.copy_on_write
    memory_budget: int | None = None
    when_busy: WhenBusy = WhenBusy.skip
    max_failures: int = 0
    keep: int | None = 2
    keep_every_hours: float | None = None
    resume: Resume = Resume.auto
    timeout_seconds: float = 1800.0
    images: bool = False  # ``survive=Images()``
    max_pls: float | None = None  # with total_steps: ``partial=PartialRecovery(…)``
    total_steps: int | None = None
    peers: bool = False  # with these: ``PartialRecovery(…, peers=PeerCopies())``
    priority_every_steps: int | None = None  # with these: ``priority=PrioritySaves(…)``
    compact_after_links: int | None = None  # either or both: ``compact_after=CompactAfter(…)``
    compact_after_share: float | None = None
    publish_root: str | None = None  # with it: ``publish=Publish(…)``, of this and the next ones
    publish_every_seconds: float = 30.0
    publish_bits: PublishBits = PublishBits["8"]
    publish_method: str = "asymmetric"
    publish_tables: list[str] | None = None


@dataclass
class DcpConfig:
    """The choice ``checkpoint: dcp``: torch's ``dcp.save`` and ``dcp.load`` of everything."""

    _target_: str = "torchrec_checknrun.hydra_config.config.make_dcp"
    root: str = MISSING
    every_steps: int = 1000
    asynchronous: bool = False
    resume: Resume = Resume.auto


@dataclass
class OffConfig:
    """The choice ``checkpoint: off``: no checkpoints, but keys that other switches may set."""

    _target_: str = "torchrec_checknrun.hydra_config.config.make_off"
    root: str | None = None
    every_steps: int | None = None
    resume: Resume = Resume.auto


class _NameOrObject(AnyNode):
    """A config's value that is one of an enum's names, or a mapping that Hydra makes an object of.

    OmegaConf has no type for that. With this node a misspelt name fails when a config is composed,
    as with an enum.
    """

    def __init__(self, names: type[Enum], value: object, key: str, parent: Any) -> None:
        self.names = names
        super().__init__(value=value, key=key, parent=parent)
        self._metadata.optional = False

    def _validate_and_convert_impl(self, value: Any) -> Any:
        if not isinstance(value, (str, int, float, bool, bytes, Enum)):
            raise ValidationError(
                f"Value {value!r} is no name of {[name.name for name in self.names]}, and no "
                "mapping with _target_"
            )
        return EnumNode.validate_and_convert_to_enum(self.names, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NameOrObject:
        copied = _NameOrObject.__new__(_NameOrObject)
        copied.names = self.names
        self._deepcopy_impl(copied, memo)
        return copied


def _check_n_run() -> DictConfig:
    """Return the node of ``check_n_run``, whose policy is a name or an object."""
    node: DictConfig = OmegaConf.structured(CheckNRunConfig)
    policy = _NameOrObject(PolicyName, node.policy, "policy", node)
    node.__dict__["_content"]["policy"] = policy
    return node


def register() -> None:
    """Register the group in Hydra's ConfigStore; called by the package's Hydra plugin."""
    store = ConfigStore.instance()
    options: dict[str, Any] = {
        "check_n_run": _check_n_run(),
        "dcp": DcpConfig,
        "dcp_async": DcpConfig(asynchronous=True),
        "off": OffConfig,
    }
    for name, node in options.items():
        store.store(group=GROUP, name=name, node=node, provider="torchrec_checknrun")


def make_check_n_run(
    *,
    root: str,
    model: nn.Module,
    state: Mapping[str, Any],
    per_rank_buffers: Patterns = (),
    callbacks: Sequence[Callable[[CheckpointReport], None]] = (),
    **values: Any,
) -> Checkpointer:
    """Make a ``Checkpointer`` of a config and the app's objects.

    Args:
        values: the other fields of ``CheckNRunConfig``.

    Raises:
        TypeError: an argument is unknown, or the root is missing.
        ValueError: as ``Checkpointer``; ``keep_every_hours`` is given, and all are kept; or a
            policy, trigger or codec is a mapping without ``_target_``.
    """
    import torchrec_checknrun as package

    _refuse_unknown(values, CheckNRunConfig, "check_n_run")
    config = CheckNRunConfig(root=root, **values)
    return package.Checkpointer(
        config.root,
        model=model,
        state=_objects(state),
        per_rank_buffers=_plain(per_rank_buffers),
        policy=_policy(config),
        quantization=_quantization(config),
        every_steps=config.every_steps,
        triggers=_triggers(config),
        background=config.background.value,
        staging=config.staging.value,
        memory_budget=config.memory_budget,
        when_busy=config.when_busy.value,
        max_failures=config.max_failures,
        retention=_retention(config),
        resume=config.resume.value,
        timeout_seconds=config.timeout_seconds,
        callbacks=callbacks,
        survive=package.Images() if config.images else None,
        partial=_partial(config),
        compact_after=_compact_after(config),
        publish=_publish(config),
    )


def _partial(config: CheckNRunConfig) -> PartialRecovery | None:
    from torchrec_checknrun import PartialRecovery, PeerCopies, PrioritySaves

    if config.max_pls is None and config.total_steps is None:
        if config.peers or config.priority_every_steps is not None:
            raise ValueError(
                "checkpoint.peers and priority_every_steps are for partial recovery: give max_pls "
                "as well"
            )
        return None
    if config.max_pls is None or config.total_steps is None:
        raise ValueError(
            "the budget of partial recovery is a portion of the run's steps: give max_pls and "
            "total_steps together"
        )
    peers = PeerCopies() if config.peers else None
    steps = config.priority_every_steps
    priority = None if steps is None else PrioritySaves(steps)
    return PartialRecovery(config.max_pls, config.total_steps, peers, priority)


def _compact_after(config: CheckNRunConfig) -> CompactAfter | None:
    from torchrec_checknrun.options.compact_after import CompactAfter

    links, share = config.compact_after_links, config.compact_after_share
    return None if links is None and share is None else CompactAfter(links=links, share=share)


def _publish(config: CheckNRunConfig) -> Publish | None:
    from torchrec_checknrun import Publish

    if config.publish_root is None:
        return None
    tables = config.publish_tables
    return Publish(
        config.publish_root,
        every_seconds=config.publish_every_seconds,
        bits=config.publish_bits.value,
        method=config.publish_method,
        tables=None if tables is None else tuple(tables),
    )


def _policy(config: CheckNRunConfig) -> Policy:
    from torchrec_checknrun.root.policy import POLICIES

    policy: PolicyName | Policy = config.policy
    _require_objects("policy", policy)
    return POLICIES[policy.value]() if isinstance(policy, PolicyName) else policy


def _quantization(config: CheckNRunConfig) -> Quantization:
    from torchrec_checknrun import Quantization

    def choice(values: Mapping[str, Any], **more: Any) -> Quantization:
        named = {**values, **more}
        optimizer, bits = named.pop("optimizer_state"), named.pop("bits")
        named["total_steps"] = named.pop("trained_steps")
        _require_objects("codec", named.get("codec"))
        return Quantization(bits=bits and bits.value, optimizer=optimizer, **named)

    given: Mapping[str, Any] = config.tables  # Hydra hands configs over, which are mappings
    tables = {pattern: choice(values) for pattern, values in given.items()}
    whole = ("expected_restores", "exact_below_rows", "reference_bytes")
    names = (*(each.name for each in fields(TableConfig)), *whole)
    return choice({name: getattr(config, name) for name in names}, tables=tables)


def _triggers(config: CheckNRunConfig) -> list[Trigger]:
    from torchrec_checknrun.schedule.triggers import AtEnd, EverySeconds, OnSigterm

    for trigger in config.triggers:
        _require_objects("triggers", trigger)
    triggers: list[Trigger] = list(config.triggers)
    if config.every_seconds is not None:
        triggers.append(EverySeconds(config.every_seconds))
    if config.at_end:
        triggers.append(AtEnd())
    if config.on_sigterm:
        triggers.append(OnSigterm(config.grace_seconds))
    return triggers


def _retention(config: CheckNRunConfig) -> Retention | None:
    from torchrec_checknrun import Retention

    if config.keep is not None:
        return Retention(config.keep, config.keep_every_hours)
    if config.keep_every_hours is not None:
        raise ValueError(
            "checkpoint.keep=null keeps all checkpoints, and "
            f"keep_every_hours={config.keep_every_hours} would have no effect: give a number to "
            "keep, such as keep=2, or omit keep_every_hours"
        )
    return None


def make_dcp(
    *,
    root: str,
    every_steps: int,
    asynchronous: bool,
    resume: Resume,
    model: nn.Module,
    state: Mapping[str, Any],
    per_rank_buffers: Patterns = (),
    callbacks: Sequence[Callable[[CheckpointReport], None]] = (),
    **unknown: Any,
) -> DcpCheckpointer:
    """Make a checkpointer on stock DCP with the same methods.

    Args:
        per_rank_buffers: ignored with a warning, since stock DCP keeps one rank's buffers; accepted
            so that the switch needs no change in the app.

    Raises:
        TypeError: an argument is unknown.
    """
    from torchrec_checknrun.hydra_config.baselines import DcpCheckpointer

    _refuse_unknown(unknown, DcpConfig, "dcp")
    if per_rank_buffers:
        logger.warning(
            "checkpoint=dcp ignores per_rank_buffers: stock DCP stores one rank's buffers, and "
            "restores them on all ranks"
        )
    return DcpCheckpointer(
        root,
        model=model,
        state=_objects(state),
        every_steps=every_steps,
        asynchronous=asynchronous,
        resume=resume.value,
        callbacks=callbacks,
    )


def make_off(*, model: nn.Module, state: Mapping[str, Any], **values: Any) -> NoCheckpointer:
    """Make a checkpointer that does nothing, with the same methods.

    Raises:
        TypeError: an argument is unknown.
    """
    from torchrec_checknrun.hydra_config.baselines import NoCheckpointer

    _refuse_unknown(values, OffConfig, "off")
    return NoCheckpointer()


def _refuse_unknown(values: Iterable[str], config: type, chosen: str) -> None:
    known = {each.name for each in fields(config)} | {"per_rank_buffers", "callbacks"}
    for name in (name for name in values if name not in known):
        raise TypeError(
            f"checkpoint={chosen} has no key {name!r}, and hydra.utils.instantiate takes beside "
            "its keys only model, state, per_rank_buffers and callbacks: see help(Checkpointer)"
        )


_OBJECTS = {
    "policy": "{_target_: my_package.MyPolicy}, or one of the names "
    + ", ".join(PolicyName.__members__),
    "codec": "{_target_: my_package.MyCodec}",
    "triggers": "[{_target_: my_package.MyTrigger, every: 3}]",
}
"""Examples of keys that take objects."""


def _require_objects(key: str, value: object) -> None:
    """Refuse what Hydra has made no object of.

    Raises:
        ValueError: a mapping has no ``_target_``, or an object was a dataclass.
    """
    if OmegaConf.is_config(value) or isinstance(value, (Mapping, list)):
        shown = _plain(value)
        raise ValueError(
            f"checkpoint.{key} must name a class by _target_, as {_OBJECTS[key]}, not {shown!r} "
            "(an object of a dataclass can't be passed to hydra.utils.instantiate, which makes a "
            "mapping of such an object: name the class in the config)"
        )


def _plain(value: Any) -> Any:
    """Return an argument as given to ``instantiate``, which converts lists into configs."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _objects(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state objects as given to ``instantiate``.

    Raises:
        ValueError: an object is a dataclass, which Hydra has copied into a config.
    """
    for name, item in state.items():
        if OmegaConf.is_config(item):
            raise ValueError(
                f"state {name!r} is a dataclass or a dict, which hydra.utils.instantiate copies "
                "into a config: pass state=types.MappingProxyType({...}), which it leaves alone"
            )
    return dict(state)
