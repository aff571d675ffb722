"""Learn of tables that other ranks alone have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchrec_checknrun.errors import UnsupportedTable
from torchrec_checknrun.model.tracked_shard import TrackedTables
from torchrec_checknrun.ranks import Ranks
from torchrec_checknrun.shards import TableShape

HERE, THERE = {"a": TableShape(4, 2)}, {"b": TableShape(5, 3), "a": TableShape(4, 2)}


class TwoRanks(Ranks):
    """Stands for ranks of which the other one answers this; TorchRec shards no data-parallel
    table among some of the ranks, which older ones might.
    """

    def __init__(self, other: Any) -> None:
        self._other = other

    def on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        return [act(), self._other]


def tables_of(tables: dict[str, TableShape]) -> TrackedTables:
    made = TrackedTables()
    made.tables, made.elsewhere, made.shards = tables, {}, []
    return made


def test_tables_of_others_are_known() -> None:
    here, there = tables_of(HERE), tables_of(THERE)
    here.agree(TwoRanks((THERE, set())))
    there.agree(TwoRanks((HERE, set())))
    assert here.tables == there.tables == HERE | THERE
    assert [*here.elsewhere] == ["b"]
    assert not there.elsewhere
    assert tables_of(HERE)._shards_of("a") == []


def test_a_data_parallel_table_is_that_of_all() -> None:
    known = tables_of(HERE)
    known.agree(TwoRanks((THERE, {"a"})))
    with pytest.raises(UnsupportedTable, match="rank 0 lacks the data-parallel table 'b'"):
        tables_of(HERE).agree(TwoRanks((THERE, {"b"})))
