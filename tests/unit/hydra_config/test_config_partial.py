"""Partial recovery and compaction as keys of the group ``checkpoint``."""

from __future__ import annotations

import pytest
from hydra.errors import InstantiationException

from tests.unit.hydra_config import test_config
from tests.unit.hydra_config.test_config import made
from torchrec_checknrun import CompactAfter, PartialRecovery, Publish

pytestmark = pytest.mark.usefixtures("recorded")
app = test_config.app
recorded = test_config.recorded

CHOICE = ("checkpoint=check_n_run", "checkpoint.root=x", "checkpoint.images=true")


def test_two_keys_are_one_argument() -> None:
    assert made(*CHOICE).arguments["partial"] is None
    arguments = made(*CHOICE, "checkpoint.max_pls=0.01", "checkpoint.total_steps=500").arguments
    assert arguments["partial"] == PartialRecovery(0.01, 500)


@pytest.mark.parametrize("alone", ["max_pls=0.01", "total_steps=500"])
def test_a_portion_needs_its_whole(alone: str) -> None:
    with pytest.raises(InstantiationException, match="give max_pls and total_steps together"):
        made(*CHOICE, f"checkpoint.{alone}")


def test_limits_of_chains_are_one_argument() -> None:
    choice = ("checkpoint=check_n_run", "checkpoint.root=x")
    assert made(*choice).arguments["compact_after"] is None
    limits = ("checkpoint.compact_after_links=8", "checkpoint.compact_after_share=0.5")
    assert made(*choice, *limits).arguments["compact_after"] == CompactAfter(links=8, share=0.5)
    assert made(*choice, limits[0]).arguments["compact_after"] == CompactAfter(links=8)


def test_publications_are_one_argument() -> None:
    choice = ("checkpoint=check_n_run", "checkpoint.root=x")
    assert made(*choice).arguments["publish"] is None
    root = "checkpoint.publish_root=y"
    assert made(*choice, root).arguments["publish"] == Publish("y")
    more = ("publish_every_seconds=5", "publish_bits=4", "publish_method=adaptive")
    found = made(
        *choice, root, *(f"checkpoint.{key}" for key in more), "checkpoint.publish_tables=[a,b]"
    ).arguments["publish"]
    assert found == Publish("y", 5.0, 4, "adaptive", ("a", "b"))
