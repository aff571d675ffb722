"""Choose the bits that a job can afford: the paper's thresholds, and estimated failures."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_checknrun.bitwidth import MOST, expected_restores, width_for

POSITIVE = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("restores", "bits"),
    [
        (0, 2),
        (0.5, 2),
        (1, 2),
        (1.0001, 3),
        (2, 3),
        (3, 3),
        (3.0001, 4),
        (19, 4),
        (20, 4),
        (20.0001, 8),
        (21, 8),
        (1e9, 8),
        (math.inf, 8),
    ],
)
def test_thresholds_are_the_papers(restores: float, bits: int) -> None:
    assert width_for(restores) == bits


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_more_restores_never_mean_fewer_bits(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert width_for(low) <= width_for(high) <= MOST == 8


@pytest.mark.parametrize("restores", [-1, -1e-9, math.nan, -math.inf])
def test_no_such_number_of_restores(restores: float) -> None:
    with pytest.raises(ValueError, match="0 or more, not"):
        width_for(restores)


def test_expected_restores_follow_from_failures() -> None:
    """Expect one failure in 25 days and 4 in 100 days of 16 nodes with 400 days between failures
    each.
    """
    assert expected_restores(nodes=16, mtbf_hours=400 * 24, job_hours=100 * 24) == 4
    assert expected_restores(nodes=1, mtbf_hours=10.0, job_hours=2.5) == 0.25


@given(st.integers(1, 10_000), POSITIVE, POSITIVE)
def test_failures_add_up_over_nodes_and_hours(nodes: int, mtbf: float, hours: float) -> None:
    restores = expected_restores(nodes, mtbf, hours)
    assert restores == pytest.approx(nodes * expected_restores(1, mtbf, hours))
    assert restores == pytest.approx(expected_restores(nodes, mtbf, 2 * hours) / 2)
    assert restores == pytest.approx(expected_restores(nodes, 2 * mtbf, hours) * 2)


@pytest.mark.parametrize("wrong", [0, -1, math.nan])
@pytest.mark.parametrize("argument", ["nodes", "mtbf_hours", "job_hours"])
def test_arguments_must_be_positive(argument: str, wrong: float) -> None:
    arguments: dict[str, Any] = {
        "nodes": 8,
        "mtbf_hours": 1000.0,
        "job_hours": 100.0,
        argument: wrong,
    }
    with pytest.raises(ValueError, match=f"{argument} {wrong}.*must be positive"):
        expected_restores(**arguments)
