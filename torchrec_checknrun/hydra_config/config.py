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
from omegaconf import MISSING, OmegaConf

if TYPE_CHECKING:
    from torch import nn

    from torchrec_checknrun.codecs.quantization import Quantization
    from torchrec_checknrun.dense.buffers import Patterns
    from torchrec_checknrun.hydra_config.baselines import DcpCheckpointer, NoCheckpointer
    from torchrec_checknrun.root.report import CheckpointReport
    from torchrec_checknrun.root.retention import Retention
    from torchrec_checknrun.run.checkpointer import Checkpointer
    from torchrec_checknrun.run.triggers import Trigger

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

GROUP = "checkpoint"
_QUANTIZATION = (
    *("bits", "method", "expected_restores", "mean_bits", "offset"),
    *("optimizer_state", "compress", "exact_below_rows"),
)
"""Keys of the config that become its ``Quantization``, beside ``tables``."""


class PolicyName(Enum):
    """The policies that need no parameters, as spelled in a config."""

    full = "full"
    one_shot = "one_shot"
    consecutive = "consecutive"
    intermittent = "intermittent"


Resume = Enum("Resume", {"auto": "auto", "must": "must", "never": "never"})
"""The default of ``restore()``; see ``Checkpointer``."""
Background = Enum("Background", {"thread": "thread", "process": "process"})
Staging = Enum("Staging", {"auto": "auto", "copy": "copy", "encode": "encode"})
WhenBusy = Enum("WhenBusy", {"skip": "skip", "wait": "wait"})
Bits = Enum("Bits", {"auto": "auto", "2": 2, "3": 3, "4": 4, "8": 8})
"""Widths as spelled in a config; null for exact rows."""


@dataclass
class TableConfig:
    """The quantization of the tables that a pattern matches; see ``Quantization``."""

    bits: Bits | None = None
    method: str = "adaptive"
    mean_bits: float | None = None
    offset: float | None = None
    optimizer_state: str = "fp32"
    compress: bool = False


@dataclass
class CheckNRunConfig:
    """The choice ``checkpoint: check_n_run``: the arguments of ``Checkpointer`` as plain values.

    The arguments of its ``Quantization``, triggers and ``Retention`` are keys here, too.
    """

    _target_: str = "torchrec_checknrun.hydra_config.config.make_check_n_run"
    root: str = MISSING
    every_steps: int | None = 1000
    policy: PolicyName = PolicyName.intermittent
    bits: Bits | None = None
    method: str = "adaptive"
    expected_restores: float | None = None
    mean_bits: float | None = None
    offset: float | None = None
    optimizer_state: str = "fp32"
    compress: bool = False
    exact_below_rows: int = 1000
    tables: dict[str, TableConfig] = field(default_factory=dict)
    every_seconds: float | None = None
    at_end: bool = False
    on_sigterm: bool = False
    grace_seconds: float = 25.0
    background: Background = Background.thread
    staging: Staging = Staging.auto
    memory_budget: int | None = None
    when_busy: WhenBusy = WhenBusy.skip
    max_failures: int = 0
    keep: int | None = 2
    keep_every_hours: float | None = None
    resume: Resume = Resume.auto
    timeout_seconds: float = 1800.0


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


def register() -> None:
    """Register the group in Hydra's ConfigStore; called by the package's Hydra plugin."""
    store = ConfigStore.instance()
    options: dict[str, Any] = {
        "check_n_run": CheckNRunConfig,
        "dcp": DcpConfig,
        "dcp_async": DcpConfig(asynchronous=True),
        "off": OffConfig,
    }
    for name, node in options.items():
        store.store(group=GROUP, name=name, node=node, provider="torchrec_checknrun")


def make_check_n_run(
    *,
    model: nn.Module,
    state: Mapping[str, Any],
    per_rank_buffers: Patterns = (),
    callbacks: Sequence[Callable[[CheckpointReport], None]] = (),
    **values: Any,
) -> Checkpointer:
    """Make a ``Checkpointer`` of a config and the app's objects.

    Args:
        values: the fields of ``CheckNRunConfig``.

    Raises:
        TypeError: an argument is unknown.
        ValueError: as ``Checkpointer``; or ``keep_every_hours`` is given, and all are kept.
    """
    import torchrec_checknrun as package
    from torchrec_checknrun.root.policy import POLICIES

    known = {field.name for field in fields(CheckNRunConfig)}
    _refuse_unknown([name for name in values if name not in known], "check_n_run")
    config = CheckNRunConfig(**values)
    return package.Checkpointer(
        config.root,
        model=model,
        state=_objects(state),
        per_rank_buffers=_buffers(per_rank_buffers),
        policy=POLICIES[config.policy.value](),
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
    )


def _quantization(config: CheckNRunConfig) -> Quantization:
    from torchrec_checknrun import Quantization

    def choice(values: Mapping[str, Any], **more: Any) -> Quantization:
        named = {**values, **more}
        optimizer, bits = named.pop("optimizer_state"), named.pop("bits")
        return Quantization(bits=bits and bits.value, optimizer=optimizer, **named)

    given: Mapping[str, Any] = config.tables  # Hydra hands configs over, which are mappings
    tables = {pattern: choice(values) for pattern, values in given.items()}
    return choice({name: getattr(config, name) for name in _QUANTIZATION}, tables=tables)


def _triggers(config: CheckNRunConfig) -> list[Trigger]:
    from torchrec_checknrun.run.triggers import AtEnd, EverySeconds, OnSigterm

    triggers: list[Trigger] = []
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

    _refuse_unknown(unknown, "dcp")
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


def make_off(
    *,
    root: str | None = None,
    every_steps: int | None = None,
    resume: Resume = Resume.auto,
    model: nn.Module,
    state: Mapping[str, Any],
    per_rank_buffers: Patterns = (),
    callbacks: Sequence[Callable[[CheckpointReport], None]] = (),
    **unknown: Any,
) -> NoCheckpointer:
    """Make a checkpointer that does nothing, with the same methods.

    Raises:
        TypeError: an argument is unknown.
    """
    from torchrec_checknrun.hydra_config.baselines import NoCheckpointer

    _refuse_unknown(unknown, "off")
    return NoCheckpointer()


def _refuse_unknown(unknown: Iterable[str], chosen: str) -> None:
    for name in unknown:
        raise TypeError(
            f"checkpoint={chosen} has no key {name!r}, and hydra.utils.instantiate takes beside "
            "its keys only model, state, per_rank_buffers and callbacks: see help(Checkpointer)"
        )


def _buffers(patterns: Any) -> Any:
    """Return the patterns as given to ``instantiate``, which converts lists into configs."""
    return OmegaConf.to_container(patterns) if OmegaConf.is_config(patterns) else patterns


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
