"""Pass on every valid key of the Hydra group ``checkpoint``; refuse others at compose."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

import torchrec_checknrun
from tests.examples import some_of
from torchrec_checknrun import (
    AtEnd,
    Consecutive,
    EverySeconds,
    Full,
    HostCopies,
    Images,
    Intermittent,
    OneShot,
    OnSigterm,
    PartialRecovery,
    PeerCopies,
    PerRank,
    PrioritySaves,
    Quantization,
)
from torchrec_checknrun.hydra_config import baselines
from torchrec_checknrun.hydra_config.baselines import NoCheckpointer
from torchrec_checknrun.hydra_config.config import GROUP, register
from torchrec_checknrun.hydra_config.making import make_check_n_run


@pytest.fixture(autouse=True)
def app(tmp_path: Path) -> Iterator[None]:
    """Make an application whose default is ``off``."""
    (tmp_path / "config.yaml").write_text(
        'defaults: [{checkpoint: "off"}, _self_]\nrun_dir: runs/one\n'
    )
    register()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Recorder:
    """A stand-in for a checkpointer that keeps its arguments."""

    def __init__(self, root: str, **arguments: Any) -> None:
        self.root = root
        self.arguments = arguments


def chosen(*overrides: str) -> DictConfig:
    cfg = compose("config", list(overrides))
    assert isinstance(cfg.checkpoint, DictConfig)
    return cfg.checkpoint


def made(*overrides: str, **arguments: Any) -> Any:
    given: dict[str, Any] = {"model": torch.nn.Linear(1, 1), "state": {}, **arguments}
    return hydra.utils.instantiate(chosen(*overrides), **given)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_checknrun, "Checkpointer", Recorder, raising=False)
    monkeypatch.setattr(baselines, "DcpCheckpointer", Recorder)


def test_all_options_are_registered() -> None:
    assert ConfigStore.instance().list(GROUP) == [
        "check_n_run.yaml",
        "dcp.yaml",
        "dcp_async.yaml",
        "off.yaml",
    ]


@pytest.mark.usefixtures("recorded")
class TestCheckNRun:
    def test_defaults_reach_the_checkpointer(self) -> None:
        checkpointer = made("checkpoint=check_n_run", "checkpoint.root=/data/run")
        assert isinstance(checkpointer, Recorder)
        assert checkpointer.root == "/data/run"
        arguments = checkpointer.arguments
        assert arguments["policy"] == Intermittent()
        assert arguments["quantization"] == Quantization(bits=None)
        assert arguments["every_steps"] == 1000
        assert arguments["callbacks"] == ()
        assert arguments["triggers"] == []
        assert (arguments["background"], arguments["staging"]) == ("thread", "copy_on_write")
        assert (arguments["when_busy"], arguments["memory_budget"]) == ("skip", None)

    def test_background_and_triggers(self) -> None:
        arguments = made(
            *("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.every_steps=null"),
            *("checkpoint.every_seconds=600", "checkpoint.at_end=true"),
            *("checkpoint.on_sigterm=true", "checkpoint.grace_seconds=12"),
            *("checkpoint.background=process", "checkpoint.staging=copy"),
            *("checkpoint.memory_budget=1000000", "checkpoint.when_busy=wait"),
            "checkpoint.max_failures=3",
        ).arguments
        assert arguments["every_steps"] is None
        assert arguments["triggers"] == [EverySeconds(600), AtEnd(), OnSigterm(12)]
        wanted = {"background": "process", "staging": "copy", "memory_budget": 1_000_000}
        wanted |= {"when_busy": "wait", "max_failures": 3}
        assert {name: arguments[name] for name in wanted} == wanted

    @pytest.mark.parametrize("what", ["background=fork", "staging=none", "when_busy=queue"])
    def test_choices_are_checked(self, what: str) -> None:
        with pytest.raises(Exception, match=what.split("=")[0]):
            made("checkpoint=check_n_run", "checkpoint.root=x", f"checkpoint.{what}")

    @pytest.mark.parametrize(
        ("name", "policy"),
        [
            ("full", Full()),
            ("one_shot", OneShot()),
            ("consecutive", Consecutive()),
            ("intermittent", Intermittent()),
        ],
    )
    def test_every_policy_has_a_name(self, name: str, policy: object) -> None:
        checkpointer = made(
            "checkpoint=check_n_run", "checkpoint.root=x", f"checkpoint.policy={name}"
        )
        assert checkpointer.arguments["policy"] == policy

    @pytest.mark.parametrize(
        ("text", "bits"), [("8", 8), ("4", 4), ("3", 3), ("2", 2), ("null", None)]
    )
    def test_bits_become_a_quantization(self, text: str, bits: int | None) -> None:
        checkpointer = made(
            "checkpoint=check_n_run", "checkpoint.root=x", f"checkpoint.bits={text}"
        )
        assert checkpointer.arguments["quantization"] == Quantization(bits=bits)

    def test_widths_that_depend(self) -> None:
        """Choose widths by the expected restores, and by table."""
        arguments = made(
            "checkpoint=check_n_run",
            "checkpoint.root=x",
            "checkpoint.bits=auto",
            "checkpoint.expected_restores=5",
            "+checkpoint.tables={t0:{bits:8},t1:{method:importance,mean_bits:3}}",
        ).arguments
        tables = {
            "t0": Quantization(bits=8),
            "t1": Quantization(method="importance", mean_bits=3),
        }
        wanted = Quantization(bits="auto", expected_restores=5, tables=tables)
        assert arguments["quantization"] == wanted

    def test_every_key_of_a_quantization(self) -> None:
        arguments = made(
            "checkpoint=check_n_run",
            "checkpoint.root=x",
            *("checkpoint.bits=4", "checkpoint.optimizer_state=log8", "checkpoint.compress=true"),
            "checkpoint.exact_below_rows=7",
            "+checkpoint.tables={t0:{method:importance,offset:0.5},t1:{optimizer_state:bf16}}",
        ).arguments
        tables = {
            "t0": Quantization(method="importance", offset=0.5),
            "t1": Quantization(optimizer="bf16"),
        }
        wanted = Quantization(
            bits=4, optimizer="log8", compress=True, exact_below_rows=7, tables=tables
        )
        assert arguments["quantization"] == wanted
        overrides = ("checkpoint.root=x", "checkpoint.method=importance", "checkpoint.offset=0.5")
        of_all = made("checkpoint=check_n_run", *overrides)
        assert of_all.arguments["quantization"] == Quantization(method="importance", offset=0.5)

    def test_every_key_of_delta(self) -> None:
        arguments = made(
            "checkpoint=check_n_run",
            "checkpoint.root=x",
            "checkpoint.policy=consecutive",
            *("checkpoint.method=delta", "checkpoint.loss=1e-5", "checkpoint.current_loss=0.4"),
            *("checkpoint.trained_steps=7", "checkpoint.batch_size=64", "checkpoint.tail=true"),
            *("checkpoint.reference_bytes=1000", "checkpoint.optimizer_state=logdelta"),
            "+checkpoint.tables={t0:{method:fisher,step:0.5}}",
        ).arguments
        assert arguments["quantization"] == Quantization(
            method="delta",
            loss=1e-5,
            current_loss=0.4,
            total_steps=7,
            batch_size=64,
            tail=True,
            reference_bytes=1000,
            optimizer="logdelta",
            tables={"t0": Quantization(method="fisher", step=0.5)},
        )

    def test_lc_checkpoint(self) -> None:
        arguments = made(
            *("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.policy=consecutive"),
            *("checkpoint.method=lc", "checkpoint.bits=2", "checkpoint.reference_bytes=1000"),
            "+checkpoint.tables={t0:{method:lc,bits:4}}",
        ).arguments
        tables = {"t0": Quantization(method="lc", bits=4)}
        wanted = Quantization(method="lc", bits=2, reference_bytes=1000, tables=tables)
        assert arguments["quantization"] == wanted

    def test_numbers_reach_the_checkpointer(self) -> None:
        arguments = made(
            "checkpoint=check_n_run",
            "checkpoint.root=x",
            "checkpoint.every_steps=7",
            "checkpoint.timeout_seconds=12.5",
        ).arguments
        assert (arguments["every_steps"], arguments["timeout_seconds"]) == (7, 12.5)

    def test_images_are_one_key(self) -> None:
        arguments = made("checkpoint=check_n_run", "checkpoint.root=x").arguments
        assert arguments["survive"] is None
        overrides = ("checkpoint.root=x", "checkpoint.images=true")
        arguments = made("checkpoint=check_n_run", *overrides).arguments
        assert arguments["survive"] == Images()

    def test_host_copies_are_one_key(self) -> None:
        overrides = ("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.host_copies=true")
        assert made(*overrides).arguments["survive"] == HostCopies()
        with pytest.raises(InstantiationException, match="give one of them"):
            made(*overrides, "checkpoint.images=true")

    def test_peer_copies_are_one_key(self) -> None:
        recovery = ("checkpoint.root=x", "checkpoint.images=true", "checkpoint.max_pls=0.1")
        overrides = (*recovery, "checkpoint.total_steps=10")
        assert made("checkpoint=check_n_run", *overrides).arguments["partial"].peers is None
        arguments = made("checkpoint=check_n_run", *overrides, "checkpoint.peers=true").arguments
        assert arguments["partial"] == PartialRecovery(0.1, 10, PeerCopies())
        with pytest.raises(InstantiationException, match="give max_pls as well"):
            made("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.peers=true")

    def test_priority_saves_are_one_key(self) -> None:
        recovery = ("checkpoint.root=x", "checkpoint.images=true", "checkpoint.max_pls=0.1")
        overrides = (*recovery, "checkpoint.total_steps=10", "checkpoint.priority_every_steps=3")
        partial = made("checkpoint=check_n_run", *overrides).arguments["partial"]
        assert partial == PartialRecovery(0.1, 10, priority=PrioritySaves(3))

    def test_values_that_only_the_library_can_judge(self) -> None:
        with pytest.raises(InstantiationException, match="mean_bits is a parameter of the methods"):
            made("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.mean_bits=5")

    def test_a_root_is_needed(self) -> None:
        with pytest.raises((MissingMandatoryValue, InstantiationException), match="root"):
            made("checkpoint=check_n_run")

    def test_a_call_without_a_root_is_refused(self) -> None:
        with pytest.raises(TypeError, match="root"):
            make_check_n_run(model=torch.nn.Linear(1, 1), state={})  # type: ignore[call-arg]  # root lacks

    def test_a_root_may_be_interpolated(self) -> None:
        checkpointer = made("checkpoint=check_n_run", "checkpoint.root=${run_dir}/checkpoints")
        assert checkpointer.root == "runs/one/checkpoints"


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("option", "asynchronous"), [("dcp", False), ("dcp_async", True)])
def test_stock_dcp_gets_the_same_keys(option: str, asynchronous: bool) -> None:
    checkpointer = made(
        f"checkpoint={option}", "checkpoint.root=/data/run", "checkpoint.every_steps=3"
    )
    assert isinstance(checkpointer, Recorder)
    assert checkpointer.root == "/data/run"
    assert checkpointer.arguments["asynchronous"] is asynchronous
    assert checkpointer.arguments["every_steps"] == 3


def test_off_saves_and_restores_nothing() -> None:
    """Switch checkpoints off by one key, and leave all other settings in place."""
    checkpointer = made("checkpoint.root=/data/run", "checkpoint.every_steps=3")
    assert isinstance(checkpointer, NoCheckpointer)
    with checkpointer:
        checkpointer.restore()
        checkpointer.restore()
        assert checkpointer.step() is None
        assert checkpointer.save() is None
        checkpointer.wait()
        assert checkpointer.steps == 1


@dataclass
class DataclassCounter:
    value: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("option", ["check_n_run", "dcp", "dcp_async"])
class TestObjects:
    """Pass objects on unchanged although Hydra copies configurations."""

    def make(self, option: str, **arguments: Any) -> dict[str, Any]:
        checkpointer = made(f"checkpoint={option}", "checkpoint.root=x", **arguments)
        assert isinstance(checkpointer, Recorder)
        return checkpointer.arguments

    def test_objects_arrive_uncopied(self, option: str) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counter, reader = Counter(), PerRank(Counter(), merge=max)
        seen: list[object] = []
        callbacks: list[Callable[[object], None]] = [seen.append, print]
        state = {"optimizer": optimizer, "counter": counter, "reader": reader}
        arguments = self.make(option, model=model, state=state, callbacks=callbacks)
        assert arguments["model"] is model
        assert type(arguments["state"]) is dict
        assert arguments["state"].keys() == state.keys()
        assert all(arguments["state"][name] is item for name, item in state.items())
        assert list(arguments["callbacks"]) == callbacks

    def test_a_dataclass_is_named(self, option: str) -> None:
        with pytest.raises(InstantiationException, match=r"'progress'.*MappingProxyType"):
            self.make(option, state={"counter": Counter(), "progress": DataclassCounter()})

    def test_a_dataclass_in_a_proxy(self, option: str) -> None:
        progress = DataclassCounter()
        state = MappingProxyType({"progress": progress})
        assert self.make(option, state=state)["state"]["progress"] is progress


OPTIONS = ["check_n_run", "dcp", "dcp_async", "off"]


@pytest.mark.parametrize(
    ("override", "named"),
    some_of(
        [
            ("checkpoint=chek_n_run", "chek_n_run"),
            ("checkpoint=null_", "null_"),
            *((f"checkpoint={option} checkpoint.evry_steps=5", "evry_steps") for option in OPTIONS),
            *((f"checkpoint={option} checkpoint.every_steps=often", "often") for option in OPTIONS),
            ("checkpoint=check_n_run checkpoint.every_steps=1.5", "1.5"),
            ("checkpoint=check_n_run checkpoint.every_steps=often", "every_steps"),
            ("checkpoint=check_n_run checkpoint.policy=oneshot", "oneshot"),
            ("checkpoint=check_n_run checkpoint.policy=null", "policy"),
            ("checkpoint=check_n_run checkpoint.bits=four", "four"),
            ("checkpoint=check_n_run checkpoint.bits=4.5", "4.5"),
            ("checkpoint=check_n_run checkpoint.bits=5", "5"),
            ("checkpoint=check_n_run +checkpoint.tables={t0:{bits:6}}", "value '6'"),
            ("checkpoint=check_n_run checkpoint.timeout_seconds=long", "long"),
            ("checkpoint=check_n_run checkpoint.asynchronous=true", "asynchronous"),
            ("checkpoint=dcp checkpoint.bits=8", "bits"),
            ("checkpoint=dcp checkpoint.asynchronous=perhaps", "perhaps"),
            ("checkpoint=off checkpoint.policy=full", "policy"),
        ],
        *(0, 2, 7, 10, 12, 15, 18, 20, 22),
    ),
)
def test_what_is_misspelt_fails_at_compose(override: str, named: str) -> None:
    with pytest.raises(HydraException) as raised:
        chosen(*override.split())
    text = "".join(str(error) for error in (raised.value, raised.value.__cause__))
    assert named in text


def test_configs_are_plain_values() -> None:
    """Log and compose configurations again."""
    cfg = chosen("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.policy=consecutive")
    again = OmegaConf.create(OmegaConf.to_yaml(cfg))
    assert again.policy == "consecutive"
    assert again.bits is None
