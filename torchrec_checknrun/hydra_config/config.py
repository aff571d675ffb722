"""Define the Hydra group ``checkpoint``: one switch between this package, stock DCP and nothing.

An app with this package installed writes ``checkpoint: check_n_run`` into its defaults, and calls
``hydra.utils.instantiate(cfg.checkpoint, model=…, state=…)`` once it has the model: every choice
has the same methods. The configs are structured: a misspelt key fails at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, EnumNode, OmegaConf
from omegaconf.errors import ValidationError
from omegaconf.nodes import AnyNode

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

    _target_: str = "torchrec_checknrun.hydra_config.making.make_check_n_run"
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
    host_copies: bool = False  # ``survive=HostCopies()``
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

    _target_: str = "torchrec_checknrun.hydra_config.making.make_dcp"
    root: str = MISSING
    every_steps: int = 1000
    asynchronous: bool = False
    resume: Resume = Resume.auto


@dataclass
class OffConfig:
    """The choice ``checkpoint: off``: no checkpoints, but keys that other switches may set."""

    _target_: str = "torchrec_checknrun.hydra_config.making.make_off"
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
