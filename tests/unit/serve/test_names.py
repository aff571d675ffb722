"""Match a model's names with saved ones, by what the user gave and by what they have in common."""

from __future__ import annotations

import pytest

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.serve.inference.names import match_names

TABLES = ["ebc.embedding_bags.a", "ebc.embedding_bags.b"]
A, B = TABLES
DENSE = ["over.weight", "over.bias"]


def test_a_renamed_table_is_nothing_else_besides() -> None:
    names = match_names(TABLES, DENSE, [A], DENSE, {A: B})
    assert names.tables == {B: A}
    assert names.missing == [f"table {A!r}"]


def test_tables_that_are_exchanged() -> None:
    names = match_names(TABLES, DENSE, TABLES, DENSE, {A: B, B: A})
    assert names.tables == {A: B, B: A}
    assert names.missing == []


def test_a_renamed_value_is_nothing_else_besides() -> None:
    names = match_names(TABLES, DENSE, TABLES, ["over.weight"], {"over.weight": "over.bias"})
    assert names.dense == {"over.bias": "over.weight"}
    assert names.missing == ["'over.weight'"]


def test_two_saved_names_for_one_of_the_model_are_refused() -> None:
    with pytest.raises(IncompatibleCheckpoint, match="two saved names into one"):
        match_names([B], DENSE, [A, B, "c"], DENSE, {A: B, "c": B})


@pytest.mark.parametrize("given", [{A: "over.weight"}, {"over.weight": A}])
def test_a_table_is_no_value(given: dict[str, str]) -> None:
    with pytest.raises(IncompatibleCheckpoint, match="is a table"):
        match_names(TABLES, DENSE, TABLES, DENSE, given)
