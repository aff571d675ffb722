"""Make users' own policies, triggers and codecs from ``_target_`` in a Hydra config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException, InstantiationException
from omegaconf import OmegaConf
from torch import nn

from tests.crash.save_sweep import alone
from tests.unit.hydra_config import test_config
from tests.unit.hydra_config.test_config import chosen, made
from torchrec_checknrun import EverySeconds
from torchrec_checknrun.codecs import Rowwise
from torchrec_checknrun.policy import Decision
from torchrec_checknrun.triggers import Moment

app = test_config.app
recorded = test_config.recorded

HERE = "tests.unit.hydra_config.test_config_objects"
GIVEN = ("checkpoint=check_n_run", "checkpoint.root=x")


@dataclass(frozen=True)
class FullEvery:
    """A policy of two kinds of checkpoints."""

    count: int = 4

    def decide(self, history: Sequence[object]) -> Decision:
        return Decision.FULL if len(history) >= self.count else Decision.SINCE_LAST


@dataclass(frozen=True)
class Once:
    """A trigger for one step."""

    step: int
    by_step = True

    def due(self, now: Moment) -> bool:
        return now.step == self.step


class Plain:
    """A trigger that is no dataclass."""

    by_step = True

    def due(self, now: Moment) -> bool:
        return False


@pytest.mark.usefixtures("recorded")
class TestNamed:
    def test_a_policy_is_made(self) -> None:
        policy = f"checkpoint.policy={{_target_:{HERE}.FullEvery,count:7}}"
        assert made(*GIVEN, policy).arguments["policy"] == FullEvery(7)

    def test_a_policy_without_parameters(self) -> None:
        policy = f"+checkpoint.policy._target_={HERE}.FullEvery"
        assert made(*GIVEN, policy).arguments["policy"] == FullEvery()

    def test_a_policy_of_this_package(self) -> None:
        policy = "checkpoint.policy={_target_:torchrec_checknrun.Consecutive}"
        assert type(made(*GIVEN, policy).arguments["policy"]).__name__ == "Consecutive"

    def test_triggers_are_made(self) -> None:
        names = f"[{{_target_:{HERE}.Once,step:5}},{{_target_:{HERE}.Plain}}]"
        arguments = made(*GIVEN, f"checkpoint.triggers={names}", "checkpoint.every_seconds=9")
        first, second, third = arguments.arguments["triggers"]
        assert (first, third) == (Once(5), EverySeconds(9))
        assert type(second) is Plain

    def test_codecs_are_made(self) -> None:
        codec = "{_target_:torchrec_checknrun.codecs.Rowwise,bits:4,method:symmetric}"
        tables = f"+checkpoint.tables={{t0:{{codec:{codec}}}}}"
        quantization = made(*GIVEN, f"checkpoint.codec={codec}", tables).arguments["quantization"]
        assert quantization.codec.spec() == Rowwise(4, "symmetric").spec()
        assert quantization.tables["t0"].codec.spec() == quantization.codec.spec()

    def test_a_name_is_still_a_name(self) -> None:
        cfg = chosen(*GIVEN, "checkpoint.policy=full")
        again = OmegaConf.create(OmegaConf.to_yaml(cfg))
        assert (cfg.policy.name, again.policy) == ("full", "full")


@pytest.mark.parametrize("policy", ["oneshot", "null", "3", "true", "[full]"])
def test_other_values_fail_at_compose_or_by_name(policy: str) -> None:
    with pytest.raises(HydraException, match="policy"):
        made(*GIVEN, f"checkpoint.policy={policy}")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("checkpoint.policy={count:7}", r"checkpoint.policy must name a class by _target_, as .*7"),
        ("checkpoint.triggers=[{step:7}]", r"checkpoint.triggers must name a class by _target_"),
        ("checkpoint.codec={bits:7}", r"checkpoint.codec must name a class by _target_"),
        ("checkpoint.codec=fp16", "codec must be an object of a class that inherits"),
        (f"checkpoint.codec={{_target_:{HERE}.Plain}}", "codec must be an object of a class"),
        ("checkpoint.policy={_target_:no.such.Policy}", r"no.such.Policy(.|\n)*checkpoint.policy"),
        (f"checkpoint.policy={{_target_:{HERE}.Plain}}", "policy must be an object such as Full()"),
        (f"checkpoint.policy={{_target_:{HERE}.FullEvery,x:1}}", r"FullEvery(.|\n)*'x'"),
        (f"checkpoint.triggers=[{{_target_:{HERE}.FullEvery}}]", "triggers must be objects such"),
        ("checkpoint.triggers=[full]", "triggers must be objects such as AtEnd"),
    ],
)
def test_errors_name_the_key(override: str, named: str, tmp_path: Path) -> None:
    with alone(), pytest.raises(InstantiationException, match=named):
        made("checkpoint=check_n_run", f"checkpoint.root={tmp_path}", override)


def test_an_object_passed_by_code_is_told_apart(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": nn.Linear(1, 1), "policy": FullEvery(3)}
    with pytest.raises(InstantiationException, match="name the class in the config"):
        made("checkpoint=check_n_run", f"checkpoint.root={tmp_path}", **given)
