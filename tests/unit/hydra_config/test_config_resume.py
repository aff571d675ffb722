"""Check the Hydra option ``resume``, which every choice of the group shares."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hydra.errors import HydraException

from tests.examples import some_of
from tests.unit.hydra_config import test_config
from tests.unit.hydra_config.test_config import chosen, made
from torchrec_checknrun.errors import CheckpointNotFound

pytestmark = pytest.mark.usefixtures("one_rank")


app = test_config.app


recorded = test_config.recorded


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("option", "resume"),
    some_of(product(["check_n_run", "dcp", "dcp_async"], ["auto", "must", "never"]), 0, 5, 7),
)
def test_it_is_passed_on(option: str, resume: str) -> None:
    overrides = (f"checkpoint={option}", "checkpoint.root=x")
    assert made(*overrides).arguments["resume"] == "auto"
    assert made(*overrides, f"checkpoint.resume={resume}").arguments["resume"] == resume


@pytest.mark.parametrize("option", ["check_n_run", "dcp", "dcp_async", '"off"'])
def test_other_words_are_refused(option: str) -> None:
    with pytest.raises(HydraException, match=r"resume|perhaps"):
        chosen(f"checkpoint={option}", "checkpoint.resume=perhaps")


@pytest.mark.parametrize("option", ["check_n_run", "dcp"])
def test_must_and_never(tmp_path: Path, option: str) -> None:
    overrides = (f"checkpoint={option}", f"checkpoint.root={tmp_path}/run")
    model = torch.nn.Linear(1, 1)
    insisting = made(*overrides, "checkpoint.resume=must", model=model)
    with insisting as saver, pytest.raises(CheckpointNotFound, match="nothing to restore"):
        saver.restore()
    with made(*overrides, model=model) as saver:
        saver.restore()
        saver.step()
        saver.save()
    with made(*overrides, "checkpoint.resume=must", model=model) as saver:
        assert saver.restore() is not None
        assert saver.steps == 1
    with made(*overrides, "checkpoint.resume=never", model=model) as saver:
        assert saver.restore(required=False) is None
        assert saver.restore() is None
        assert saver.steps == 0
        assert saver.restore(required=True) is not None
