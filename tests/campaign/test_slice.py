"""Run a slice of the campaign: a few trials of each part, with a fixed seed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.campaign.results import problems
from tests.distributed.forked import Forked

LEAST = {
    "kills-thread": 5,
    "kills-delta": 2,
    "faults-1-rank": 24,
    "faults-2-ranks": 4,
    "faults-delta": 10,
    "faults-lc": 2,
    "damage": 16,
    "damage-delta": 8,
    "damage-lc": 2,
    "hostile": 500,
}
"""Minimum counts: fewer trials show nothing."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the slice in a process of its own: a process that forks must have no threads."""
    folder = tmp_path_factory.mktemp("campaign")
    file, log = folder / "campaign.json", folder / "log"
    Forked("tests.campaign", "--slice", "--json", str(file), log=log).wait(560)
    assert file.exists(), log.read_text()[-6000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(600)  # a minute on two idle CPUs
@pytest.mark.parametrize("part", LEAST)
def test_nothing_is_lost_and_nothing_silent(rows: dict[str, Any], part: str) -> None:
    assert not rows[part]["failures"], "\n".join(problems({part: rows[part]}))
    assert rows[part]["tried"] >= LEAST[part]
