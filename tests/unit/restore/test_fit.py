"""Tables under new names, for a checkpoint from before and for one from after the change."""

from __future__ import annotations

import logging

import pytest

from torchrec_checknrun.errors import IncompatibleCheckpoint
from torchrec_checknrun.restore.fit import Fit, match_tables
from torchrec_checknrun.shards import TableShape

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
