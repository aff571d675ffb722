"""Tables under new names, for a checkpoint from before and for one from after the change."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from tests.unit.chains import DIM, make_shards
from tests.unit.entries import header_of
from torchrec_checknrun.codecs import Exact
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.format.row_chunk import encode_rows
from torchrec_checknrun.restore.fit import Fit, check_rows, match_tables
from torchrec_checknrun.shards import Rectangle, TableShape

SHAPE = TableShape(4, 8)


def match(saved: str, wanted: str, strict: bool = True, /, **rename: str) -> dict[str, str]:
    """Return which table of a model goes where, each of one letter."""
    into, stored = dict.fromkeys(wanted, SHAPE), dict.fromkeys(saved, SHAPE)
    return match_tables(into, stored, Fit(rename, strict=strict)).target


@pytest.mark.parametrize(
    ("rename", "saved", "after"),
    [
        ({"a": "b"}, "ac", {"a": "b", "c": "c"}),
        ({"a": "b"}, "bc", {"b": "b", "c": "c"}),
        ({"a": "b", "b": "c"}, "ab", {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, "bc", {"b": "b", "c": "c"}),  # a restart: neither moves again
        ({"a": "b", "d": "c"}, "bd", {"b": "b", "d": "c"}),  # another name, after a restart
    ],
)
def test_names_are_changed_once(
    caplog: pytest.LogCaptureFixture, rename: dict[str, str], saved: str, after: dict[str, str]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert match(saved, "bc", **rename) == after
    assert ("already" in caplog.text) == (not rename.keys() <= set(saved))


def test_what_goes_on_after_a_restart_is_not_resized() -> None:
    table = {"b": SHAPE}
    assert not match_tables(table, table, Fit({"a": "b"})).resized
    assert match_tables(table, {"a": SHAPE}, Fit({"a": "b"})).resized


def test_names_that_are_exchanged_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Warn where a checkpoint doesn't show whether it is from before or after."""
    assert match("ab", "ab", a="b", b="a") == {"a": "b", "b": "a"}
    assert "once only" in caplog.text


def test_a_name_of_neither_is_refused() -> None:
    with pytest.raises(IncompatibleCheckpoint, match="the checkpoint has no table 'x'"):
        match("ac", "bc", x="b")
    with pytest.raises(IncompatibleCheckpoint, match="the checkpoint has no table 'x', nor any"):
        match("", "b", x="b")


@pytest.mark.parametrize(
    ("only", "remedy"),
    [
        (None, "another name and let it begin anew with strict=False"),
        (("a",), "leave the table out"),
    ],
)
def test_a_table_of_another_dimension_is_refused_with_the_remedy(
    only: tuple[str, ...] | None, remedy: str
) -> None:
    wider = replace(SHAPE, dim=2 * SHAPE.dim)
    for strict in (True, False):
        with pytest.raises(IncompatibleCheckpoint, match=f"saved dimension, or .*{remedy}"):
            match_tables({"a": wider}, {"a": SHAPE}, Fit(strict=strict, only=only))
    fit = Fit(strict=False)
    assert match_tables({"b": wider}, {"a": SHAPE}, fit).target == {}


def test_a_planner_s_choice_on_other_ranks_is_no_other_optimizer() -> None:
    """Name the plan as the cause where a small table that was sharded is data-parallel now: the
    state would be lost with ``strict=False``, and the optimizer is the one it was trained with.
    """
    (saved,) = make_shards(4, [Rectangle(0, 4, 0, DIM)])
    header = header_of(encode_rows(saved.block(torch.arange(4)), TableEncoding(Exact())).entry)
    sharded = replace(saved, optimizer={})
    with pytest.raises(IncompatibleCheckpoint, match="has none: use the optimizer"):
        check_rows(sharded, header, Fit())
    with pytest.raises(IncompatibleCheckpoint, match="is data-parallel here") as caught:
        check_rows(replace(sharded, replicated=True), header, Fit())
    assert f"constraints={{{saved.table.rpartition('.')[2]!r}: Param" in str(caught.value)


def test_what_load_tables_has_no_argument_for_is_not_advised() -> None:
    """Advise what a warm start takes: it has no ``strict=False``."""
    of_load_tables = Fit(optimizer=True, only=("b",))
    with pytest.raises(IncompatibleCheckpoint, match="leave it out of the tables") as caught:
        match_tables({"b": SHAPE}, {"a": SHAPE}, of_load_tables)
    assert "strict" not in str(caught.value)
    (saved,) = make_shards(4, [Rectangle(0, 4, 0, DIM)])
    header = header_of(encode_rows(saved.block(torch.arange(4)), TableEncoding(Exact())).entry)
    with pytest.raises(IncompatibleCheckpoint, match="without optimizer=True") as caught:
        check_rows(replace(saved, optimizer={}), header, of_load_tables)
    assert "strict" not in str(caught.value)
