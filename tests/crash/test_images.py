"""Kill runs with images, by real SIGKILLs: their end is that of an undisturbed run, bit for bit.

The whole sweep is ``python -m tests.crash.images``; this is a slice of it. All tests of one number
of ranks share a process and its undisturbed run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.forked import Forked

Sweep = tuple[str, ...]
"""The number of ranks, then the arguments of ``tests.crash.images``."""

pytestmark = pytest.mark.timeout(900)  # the first test waits for all


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[Sweep, Any]]:
    """Return a function that runs all sweeps that the session's tests ask for."""
    here = [item for item in request.session.items if item.path == request.path]
    asked: list[Sweep] = [item.callspec.params["found"] for item in here]  # type: ignore[attr-defined]  # pytest.Function has it

    @cache
    def outcomes(ranks: str) -> dict[Sweep, Any]:
        chosen = [sweep for sweep in asked if sweep[0] == ranks]
        file = tmp_path_factory.mktemp("sweeps") / "images.json"
        words = json.dumps([sweep[1:] for sweep in chosen])
        log = file.with_name("log")
        # A process of its own: a process that forks must have no threads.
        Forked(
            *("tests.crash.images", "--json", str(file), "--sweeps", words),
            log=log,
            environment={**os.environ, "CHECKNRUN_TEST_RANKS": ranks},
        ).wait(850)
        assert file.exists(), log.read_text()[-6000:]
        return dict(zip(chosen, json.loads(file.read_text()), strict=True))

    return outcomes


@pytest.fixture
def found(request: pytest.FixtureRequest, run: Callable[[str], dict[Sweep, Any]]) -> dict[str, Any]:
    outcome: dict[str, Any] = run(request.param[0])[request.param]
    return outcome


def sweep(*words: str, ranks: int = 2) -> pytest.MarkDecorator:
    """Give a test the outcome of a sweep."""
    return pytest.mark.parametrize("found", [(str(ranks), *words)], indirect=True, ids=["sweep"])


@pytest.mark.parametrize(
    ("found", "recoveries"),
    [
        (("2", "--moments", "3", "--backward", "3", "--uncommitted", "2"), 12),
        pytest.param(
            *(("2", "--moments", "5", "--backward", "5", "--uncommitted", "3"), 20),
            marks=pytest.mark.slow,
        ),
    ],
    indirect=["found"],
    ids=["some", "more"],
)
def test_no_step_is_lost_and_every_bit_is_right(found: dict[str, Any], recoveries: int) -> None:
    assert not found["failures"], "\n".join(found["failures"])
    assert sum(n for name, n in found["counts"].items() if " " in name) > 0
    assert found["counts"]["recoveries of a rank by images"] >= recoveries


@sweep("--unheard", "1", "--recovery", "5")
def test_commits_nobody_has_heard_of_and_kills_in_recoveries(found: dict[str, Any]) -> None:
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["in the middle of a recovery"] >= 3


@sweep("--backward", "1", ranks=3)
def test_three_ranks_whose_sums_depend_on_their_order(found: dict[str, Any]) -> None:
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["recoveries of a rank by images"] >= 3


@pytest.mark.slow
@sweep("--every-point")
def test_kills_at_every_point_of_a_recovery(found: dict[str, Any]) -> None:
    assert not found["failures"], "\n".join(found["failures"])
    assert found["counts"]["in the middle of a recovery"] >= 18


def sabotaged(name: str, reason: str, *kills: str, slow: bool = False) -> Any:
    """Give a test the outcome of a sweep with a sabotage, and what it is found by."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(("2", "--sabotage", name, *kills), reason, marks=marks, id=name)


LACKS, DIFFERS = "chain lacks model/c.embedding_bags", "differs in model/c.embedding_bags"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        sabotaged("one_table_unjournaled", DIFFERS, "--backward", "8"),
        sabotaged("state_not_written", "no images though step", "--backward", "2"),
        sabotaged("marks_not_pending", LACKS, "--uncommitted", "2"),
        sabotaged("unmarked", LACKS, "--moments", "2", slow=True),
        sabotaged("journals_dropped_early", DIFFERS, "--backward", "6", slow=True),
        sabotaged(
            *("older_state", "no images though step|differs|did not end", "--backward", "6"),
            slow=True,
        ),
    ],
    indirect=["found"],
)
def test_a_sabotage_turns_it_red(found: dict[str, Any], reason: str) -> None:
    assert any(part in failure for part in reason.split("|") for failure in found["failures"])
