"""Make checkpointers of the configs in the group ``checkpoint`` and the app's objects.

Hydra calls these functions, which the configs name; torch and TorchRec are imported then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from torchrec_checknrun.hydra_config.config import (
    CheckNRunConfig,
    DcpConfig,
    OffConfig,
    PolicyName,
    Resume,
    TableConfig,
)

if TYPE_CHECKING:
    from torch import nn

    from torchrec_checknrun.codecs.quantization import Quantization
    from torchrec_checknrun.hydra_config.baselines import DcpCheckpointer, NoCheckpointer
    from torchrec_checknrun.memory.images import HostCopies, Images
    from torchrec_checknrun.memory.partial import PartialRecovery
    from torchrec_checknrun.options.compact_after import CompactAfter
    from torchrec_checknrun.options.publish import Publish
    from torchrec_checknrun.root.policy import Policy
    from torchrec_checknrun.root.report import CheckpointReport
    from torchrec_checknrun.root.retention import Retention
    from torchrec_checknrun.run.checkpointer import Checkpointer
    from torchrec_checknrun.schedule.triggers import Trigger
    from torchrec_checknrun.values.buffers import Patterns

logger = logging.getLogger("torchrec_checknrun.run.checkpointer")

_jobs: dict[tuple[str, str], int] = {}
"""By directory of a multirun and root, the first job of this process that had the root."""


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
    _tell_of_shared_root(config.root)
    _tell_of_no_effect(config)
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
        survive=_survive(config),
        partial=_partial(config),
        compact_after=_compact_after(config),
        publish=_publish(config),
    )


def _tell_of_shared_root(root: str) -> None:
    """Warn of a root that an earlier job of the same multirun had: this one goes on from its
    checkpoints, in place of a start of its own.
    """
    from torchrec_checknrun.store.retry import masked

    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return
    job = HydraConfig.get().job.num
    first = _jobs.setdefault((HydraConfig.get().sweep.dir, root), job)
    if first != job:
        logger.warning(
            "jobs %s and %s of this multirun have one root, %s: this job goes on from the other's "
            "checkpoints. Give each its own, as by checkpoint.root='/checkpoints/${hydra:job.num}'",
            first,
            job,
            masked(root),
        )


def _tell_of_no_effect(config: CheckNRunConfig) -> None:
    """Warn of keys that were set, and do nothing while another one is off."""
    of_publish = [each.name for each in fields(config) if each.name.startswith("publish_")]
    switches = {
        "on_sigterm=true": (config.on_sigterm, ["grace_seconds"]),
        "publish_root": (config.publish_root is not None, of_publish),
    }
    default = CheckNRunConfig()
    for switch, (is_on, names) in switches.items():
        for name in names if not is_on else ():
            if getattr(config, name) != getattr(default, name):
                logger.warning("checkpoint.%s has no effect without checkpoint.%s", name, switch)


def _survive(config: CheckNRunConfig) -> Images | HostCopies | None:
    from torchrec_checknrun import HostCopies, Images

    if config.images and config.host_copies:
        raise ValueError(
            "check_n_run: images=true keeps every step, host_copies=true the newest checkpoint, "
            "for tables on a GPU: give one of them"
        )
    if config.host_copies:
        return HostCopies()
    return Images() if config.images else None


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
