"""Draw training programs, kill and restore them, and compare them with a run without an end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import OF_HISTORIES, examples
from tests.unit.drawn_programs.programs import CHOICES, Program, fitting
from tests.unit.drawn_programs.running import run_in

programs = st.fixed_dictionaries(
    {
        name: st.one_of(st.just(values[0]), st.sampled_from(values))
        for name, values in CHOICES.items()
    }
).map(lambda chosen: fitting(Program(**chosen)))

REFUSED = re.compile(
    r"weights or optimizer rows of .* were written outside of training .* "
    r"while they were being saved, so that .* Write inside"
)
"""Errors that a drawn program may end in: each names thing, expectation and remedy."""


@pytest.mark.timeout(3600)
@settings(OF_HISTORIES, max_examples=examples(200, quick=6))
@given(program=programs)
def test_any_program_goes_on_as_if_it_had_not_ended(
    tmp_path_factory: pytest.TempPathFactory, program: Program
) -> None:
    outcome = run_in(tmp_path_factory.mktemp("drawn") / "run", program)
    assert outcome.invalid is None, f"{program}: {outcome.invalid}"
    told = [*outcome.failed, *([] if outcome.refused is None else [outcome.refused])]
    assert all(map(REFUSED.search, told)), f"{program}: {told}"
    assert not outcome.lost, f"{program}: " + "\n".join(outcome.lost[:40])
