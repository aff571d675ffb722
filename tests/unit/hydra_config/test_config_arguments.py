"""Check Hydra's group: an application's arguments, contradicting keys, roots of stock DCP."""

from __future__ import annotations

import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from torch import nn

from tests.crash.save_sweep import alone
from tests.docs.blocks import blocks_of
from tests.unit.hydra_config import test_config
from tests.unit.hydra_config.test_config import made
from torchrec_checknrun import Checkpointer, Retention
from torchrec_checknrun.errors import CheckpointNotFound
from torchrec_checknrun.hydra_config.baselines import DcpCheckpointer, NoCheckpointer

app = test_config.app
recorded = test_config.recorded

OPTIONS = ["check_n_run", "dcp", "dcp_async", '"off"']


def merge(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "given", ["*.mean", ("*.mean",), ["*.mean"], MappingProxyType({"*.mean": merge})]
)
def test_buffers_per_rank(given: Any) -> None:
    saver = made("checkpoint=check_n_run", "checkpoint.root=x", per_rank_buffers=given)
    found = saver.arguments["per_rank_buffers"]
    whole = isinstance(given, (str, MappingProxyType))
    assert found == given if whole else tuple(found) == tuple(given)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("option", OPTIONS)
def test_all_choices_take_the_same_arguments(option: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made(f"checkpoint={option}", "checkpoint.root=x", per_rank_buffers="*", callbacks=[print])
    assert ("ignores per_rank_buffers" in caplog.text) == option.startswith("dcp")


@pytest.mark.parametrize("option", OPTIONS)
def test_unknown_arguments_are_refused_by_name(option: str) -> None:
    with pytest.raises(InstantiationException, match=r"no key 'chunk_size'.*per_rank_buffers"):
        made(f"checkpoint={option}", "checkpoint.root=x", chunk_size=3)


def test_real_buffers_are_declared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    patterns = ["*.running_*"]
    root = f"checkpoint.root={tmp_path}/run"
    with alone():
        saver = made("checkpoint=check_n_run", root, model=model, per_rank_buffers=patterns)
        assert sorted(saver._target.buffers._merges) == ["0.running_mean", "0.running_var"]
        saver.close()


@pytest.mark.usefixtures("recorded")
def test_keeping_all_and_some_of_every_hour() -> None:
    options = ("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.keep=null")
    assert made(*options).arguments["retention"] is None
    with pytest.raises(InstantiationException, match=r"keep=null .*keep_every_hours=6"):
        made(*options, "checkpoint.keep_every_hours=6")


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("given", "switch", "value"),
    [
        ("grace_seconds=60", "on_sigterm", "true"),
        ("publish_every_seconds=5", "publish_root", "y"),
        ("publish_bits=4", "publish_root", "y"),
        ("publish_method=adaptive", "publish_root", "y"),
        ("publish_tables=[a]", "publish_root", "y"),
    ],
)
def test_keys_that_have_no_effect_are_told(
    given: str, switch: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("checkpoint=check_n_run", "checkpoint.root=x", f"checkpoint.{given}")
    made(*options)
    key = given.partition("=")[0]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"checkpoint.{key} has no effect without checkpoint.{switch}")
    caplog.clear()
    made(*options, f"checkpoint.{switch}={value}")
    made(*options[:2])
    assert not caplog.records


@pytest.mark.parametrize("hours", ["6", True, float("nan"), 0, -1.0, [6]])
def test_hours_are_numbers(hours: Any) -> None:
    with pytest.raises(ValueError, match="every_hours must be positive, a number of hours"):
        Retention(2, hours)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Retention(True, None)


class TestStock:
    def saver(self, root: object, every_steps: int = 1) -> DcpCheckpointer:
        model = nn.Linear(1, 1)
        return DcpCheckpointer(str(root), model=model, state={}, every_steps=every_steps)

    @pytest.mark.parametrize("root", ["s3://bucket/run", "https://me:secret@host/run"])
    def test_urls_are_refused(self, root: str) -> None:
        with pytest.raises(ValueError, match="saves into a folder") as refused:
            self.saver(root)
        assert "secret" not in str(refused.value)

    @pytest.mark.parametrize("every_steps", [0, -1])
    def test_steps_that_never_come_are_refused(self, tmp_path: Path, every_steps: int) -> None:
        with pytest.raises(ValueError, match=f"at least 1, such as 1000, not {every_steps}"):
            self.saver(tmp_path, every_steps)

    def test_a_job_may_call_whatever_it_calls_of_a_checkpointer(self, tmp_path: Path) -> None:
        for saver in (NoCheckpointer(), self.saver(tmp_path)):
            assert {n for n in dir(Checkpointer) if not n.startswith("_")} <= {*dir(saver)}
            with saver.writing("t", [3]):
                saver.mark("t", [3])
            saver.mark_all()
            saver.publish()
            assert saver.published is None
        NoCheckpointer().restore(required=True)
        with pytest.raises(CheckpointNotFound):
            self.saver(tmp_path).restore(required=True)

    def test_an_empty_root_is_not_the_working_directory(self) -> None:
        with pytest.raises(ValueError, match="root is empty"):
            self.saver("")

    def test_the_newest_is_that_of_the_highest_step(self, tmp_path: Path) -> None:
        for step in (7, 99_999_999, 100_000_000, 100_000_003):
            (tmp_path / f"step-{step:08d}").mkdir()
            (tmp_path / f"step-{step:08d}" / ".metadata").touch()
        (tmp_path / "step-200000000").mkdir()  # unfinished
        found = self.saver(tmp_path)._newest()
        assert found is not None
        assert found.name == "step-100000003"


@pytest.mark.usefixtures("recorded")
def test_an_option_of_ones_own(tmp_path: Path) -> None:
    """Compose the page's option, and what else the command line may choose in its place."""
    page = blocks_of("docs/how-to/hydra.md")
    (text,) = [block.text for block in page if "conf/checkpoint/mine.yaml" in block.text]
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.yaml").write_text(text)
    saver = made("checkpoint=mine", "checkpoint.root=x")
    assert saver.arguments["policy"] == "consecutive"
    assert saver.arguments["quantization"].bits == 8
    assert made('checkpoint="off"', "checkpoint.root=x", "checkpoint.every_steps=7").steps == 0
