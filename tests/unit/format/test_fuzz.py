"""Restore or refuse chains with random changes; ``fuzz`` tries more of them."""

from __future__ import annotations

import os
import time

import pytest

from tests.unit.chains import new_root
from tests.unit.forgery import attack, example, seal
from tests.unit.fuzz import campaign, run


def test_the_example_is_sound() -> None:
    root = new_root()
    assert attack(root, seal(root, example())) == []


def test_random_changes_are_restored_or_refused() -> None:
    """Try chains for two seconds at most, even on a busy machine."""
    end = time.monotonic() + 2
    counts = campaign(200, 7, example(), lambda: time.monotonic() > end)
    assert counts.inputs >= 5
    assert counts.refused > counts.inputs / 2


@pytest.mark.slow
def test_as_many_as_the_time_allows() -> None:
    counts = run(float(os.environ.get("CHECKNRUN_FUZZ_SECONDS", "120")))
    assert counts.inputs > 100
