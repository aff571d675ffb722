"""Return values beside numbers, tensors and containers unchanged; sets in a fixed order."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from enum import IntEnum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.chains import new_root
from tests.unit.plain_states import load, save
from torchrec_checknrun.errors import UnsupportedState
from torchrec_checknrun.format.state_tree import check_tree
from torchrec_checknrun.tools.diff import same
from torchrec_checknrun.values.state import decode_state, encode_state

INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
DTYPES = [torch.float32, torch.bfloat16, torch.quint8, torch.complex64, torch.bool]
SIZES = st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
RANGES = st.builds(range, INTEGERS, INTEGERS, INTEGERS.filter(bool))
PATHS = st.sampled_from(
    [Path("a/b"), Path(), Path("/"), PurePosixPath("x"), PureWindowsPath("c:x")]
)
DEVICES = st.sampled_from(["cpu", "cuda:3", "meta"]).map(torch.device)
ZONES = st.none() | st.integers(-1439, 1439).map(lambda n: timezone(timedelta(minutes=n)))
TIMES = (st.datetimes(timezones=ZONES) | st.times()).map(lambda time: time.replace(fold=0))
PLAIN = st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=3)
LEAVES = st.one_of(
    *(PLAIN, st.complex_numbers(), st.sampled_from(DTYPES), SIZES, RANGES, PATHS, DEVICES),
    *(TIMES, st.dates(), st.timedeltas()),
    *(
        st.binary(max_size=3),
        st.builds(np.int64, INTEGERS),
        st.builds(np.float32, st.floats(width=32)),
    ),
)
MEMBERS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
)
VALUES = LEAVES | st.builds(slice, PLAIN, PLAIN, PLAIN) | st.sets(MEMBERS, max_size=5) | MEMBERS


def again(value: object) -> Any:
    tree, pieces = encode_state(value, "own")
    stored = json.loads(json.dumps(tree))
    check_tree(stored, sum(memoryview(piece).nbytes for piece in pieces))
    return decode_state(stored, b"".join(pieces))


def described(value: object) -> Any:
    """Describe a value by type and parts; sort sets by the descriptions."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted((described(member) for member in value), key=repr)
    if type(value) is tuple:
        return tuple, [described(member) for member in value]
    if isinstance(value, slice):
        return slice, [described(part) for part in (value.start, value.stop, value.step)]
    if isinstance(value, float):
        return type(value), "nan" if math.isnan(value) else value.hex()
    return type(value), repr(value)


@settings(max_examples=examples(300), deadline=None)
@given(VALUES)
def test_every_value_is_what_it_was(value: object) -> None:
    assert described(again(value)) == described(value)
    assert same(value, again(value))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(MEMBERS, max_size=6), st.randoms())
def test_the_order_of_a_set_is_no_matter(members: list[Any], random: Any) -> None:
    members = list(set(members))
    shuffled = list(members)
    random.shuffle(shuffled)
    assert encode_state(set(members), "own") == encode_state(set(shuffled), "own")


MIXED = """{1, 2, 33, "a", "b", "cc", None, 2.5, b"x", (1, "y"), frozenset({"p", "q", 7}), 3j}"""


def test_the_order_is_that_of_every_process() -> None:
    program = (
        "import json; from torchrec_checknrun.values.state import encode_state; "
        f"print(json.dumps(encode_state({MIXED}, '')[0]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True
    )
    here = encode_state(eval(MIXED), "")[0]
    assert json.loads(found.stdout) == json.loads(json.dumps(here))


def local_level() -> IntEnum:
    """Return a member of an enumeration that no module holds."""
    return IntEnum("Level", "LOW").LOW  # type: ignore[attr-defined]  # a class made at run time


class Point(NamedTuple):
    x: int


class OwnSet(set[int]):
    pass


ODD = timezone(timedelta(microseconds=1))


class Day(date):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {object()}, r"own\.k is a set with a object, which may not compare equal"),
        (lambda: {torch.zeros(1)}, r"own\.k is a set with a Tensor"),
        (lambda: {(1, (torch.zeros(1),))}, r"own\.k is a set with a Tensor"),
        (lambda: {local_level(), "x"}, r"own\.k is a .*Level"),
        (lambda: {Point(1)}, r"own\.k is a .*Point"),
        (lambda: OwnSet(), r"own\.k is a .*OwnSet"),
        (lambda: slice(torch.zeros(1)), r"own\.k is a builtins\.slice"),
        (lambda: slice(slice(1)), r"own\.k is a builtins\.slice"),
        (lambda: range(2**70), r"own\.k is a builtins\.range"),
        (lambda: datetime(2026, 11, 1, tzinfo=ZoneInfo("Europe/Berlin")), r"own\.k is a datetime"),
        (lambda: datetime(2026, 11, 1, fold=1), r"own\.k is a datetime"),
        (lambda: datetime(2026, 11, 1, tzinfo=ODD), r"own\.k is a datetime"),
        (lambda: Day(2026, 11, 1), r"own\.k is a .*Day"),
        (lambda: deque([{1: deque([object()])}]), r"own\.k\[0\]\.1\[0\] is a builtins\.object"),
        (lambda: np.complex64(1), None),
    ],
)
def test_what_is_refused_names_the_key(make: Callable[[], object], words: str | None) -> None:
    if words is None:
        assert type(again({"k": make()})["k"]) is type(make())
        return
    with pytest.raises(UnsupportedState, match=words):
        encode_state({"k": make()}, "own")


def test_through_a_checkpoint() -> None:
    root = new_root()
    value = {"seen": {3, 1, 2}, "dtype": torch.bfloat16, "files": [Path("a"), slice(1, None)]}
    save(root, "one", {"own": value})
    live: dict[str, Any] = {"own": {"seen": set(), "dtype": None, "files": []}}
    load(root, "one", live)
    assert described(live["own"]["seen"]) == described(value["seen"])
    assert live["own"] == value
