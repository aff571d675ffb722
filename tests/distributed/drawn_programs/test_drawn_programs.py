"""Draw programs of several ranks, kill and restore them, and compare all that they leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.drawn_programs.programs import Ranked, drawn, fitting
from tests.distributed.drawn_programs.running import Workers, run_in
from tests.examples import ALL, some_of
from tests.unit.drawn_programs.programs import Program
from tests.unit.drawn_programs.test_drawn_programs import REFUSED

SEVERAL_LAYOUTS = Ranked(
    Program(wrapper="keyed", schedule="lambda", by_hand="marked", replica=True, extra="dropout"),
    ranks=(2, 1),
    plan=3,
    published=True,
)
TORN_APART = Ranked(
    Program(survive="images", ways=("images",), torn=True, dense="adam", extra="batch_norm"),
    torn="apart",
)
IN_PART = Ranked(
    Program(survive="priority", between="metric", policy="one_shot"), lost="one", peers=True
)

MAPPED = Ranked(
    Program(
        tables="mapped",
        sharding="row_wise",
        fused="adagrad",
        survive="images",
        ways=("images", "checkpoint"),
        torn=True,
    ),
    slow=True,
)


def check(workers: Workers, folder: Path, ranked: Ranked) -> None:
    """Assert that a program differs in nothing, and that its failures are those it may have."""
    outcome = run_in(workers, folder / "run", ranked)
    assert outcome.invalid is None, f"{ranked}: {outcome.invalid}"
    told = [*outcome.failed, *([] if outcome.refused is None else [outcome.refused])]
    told = [line for line in told if not (ranked.fails and "says the test" in line)]
    assert all(map(REFUSED.search, told)), f"{ranked}: {told}"
    assert not outcome.lost, f"{ranked}: " + "\n".join(outcome.lost[:40])


@pytest.mark.parametrize("ranked", [SEVERAL_LAYOUTS, TORN_APART, IN_PART], ids=str)
def test_programs_of_each_way_back(workers: Workers, tmp_path: Path, ranked: Ranked) -> None:
    assert fitting(ranked) == ranked
    check(workers, tmp_path, ranked)


@pytest.mark.slow
def test_a_program_of_mapped_ids(workers: Workers, tmp_path: Path) -> None:
    assert fitting(MAPPED) == MAPPED
    check(workers, tmp_path, MAPPED)


@pytest.mark.slow
def test_images_stay_where_the_end_was_not_saved(workers: Workers, tmp_path: Path) -> None:
    ranked = Ranked(Program(survive="images", ways=("images",), kill=3), closed=True, fails=True)
    outcome = run_in(workers, tmp_path / "run", ranked)
    assert (outcome.invalid, outcome.refused, outcome.lost) == (None, None, [])
    assert "from images" in outcome.facts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(60))
def test_any_program_goes_on(workers: Workers, tmp_path: Path, seed: int) -> None:
    check(workers, tmp_path, drawn(seed))


BROKEN = [
    ("a row is not marked", Ranked()),
    ("rows by hand are not marked", Ranked(Program(by_hand="marked", kill=6), plan=1)),
    ("states are restored from rank 0's", Ranked(Program(extra="dropout"))),
    ("a torn step is not undone", TORN_APART),
    ("ids since the last eviction are lost", MAPPED),
]


@pytest.mark.parametrize(("sabotage", "ranked"), some_of(BROKEN, 3))
def test_what_one_rank_breaks_is_found(
    workers: Workers, tmp_path: Path, sabotage: str, ranked: Ranked
) -> None:
    if ALL:  # else the tests above have run it
        check(workers, tmp_path, ranked)
    assert run_in(workers, tmp_path / "broken", ranked, sabotage).lost
