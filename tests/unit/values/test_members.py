"""Members of enumerations come back as themselves, and as a refusal where a process lacks them."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit.chains import new_root
from tests.unit.plain_states import load, save
from torchrec_checknrun.errors import IncompatibleCheckpoint, UnsupportedState
from torchrec_checknrun.format.state_tree import check_tree
from torchrec_checknrun.restore.content_tree import require_members
from torchrec_checknrun.tools.values_json import values_json
from torchrec_checknrun.values.keys import decode_key, encode_key, key_name
from torchrec_checknrun.values.members import AbsentMember
from torchrec_checknrun.values.state import decode_state, encode_state


class Phase(IntEnum):
    WARM = 1
    HOT = 2


class Split(str, Enum):
    TRAIN = "train"


class Parts(Flag):
    ROWS = auto()
    DENSE = auto()


class Loop:
    class Mode(Enum):
        FAST = "fast"
        QUICK = "fast"  # another name of the same
        name_of_none = None


VALUES = [*Phase, *Split, *Parts, *Loop.Mode, Loop.Mode.QUICK]


def again(value: object) -> Any:
    tree, pieces = encode_state(value, "own")
    stored = json.loads(json.dumps(tree))
    check_tree(stored, sum(memoryview(piece).nbytes for piece in pieces))
    return decode_state(stored, b"".join(pieces))


@pytest.mark.parametrize("member", VALUES, ids=repr)
def test_a_member_is_itself_again(member: Enum) -> None:
    assert again(member) is member
    assert again([{"at": (member,)}])[0]["at"][0] is member
    assert next(iter(again({member: 1}))) is member
    assert next(iter(again({(member, 1): 1})))[0] is member
    assert again({member}).pop() is member


class Left(Enum):
    OVER = 1


def test_a_member_that_a_process_lacks_is_refused_by_a_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = new_root()
    save(root, "one", {"own": {"phase": Left.OVER, "steps": {Left.OVER: 3}}})
    live: dict[str, Any] = {"own": {"phase": Left.OVER, "steps": {}}}
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules[__name__], "Left")
        with pytest.raises(CheckpointException, match=rf"Left.OVER.*{__name__} defines no"):
            load(root, "one", live)
    load(root, "one", live)
    assert live["own"] == {"phase": Left.OVER, "steps": {Left.OVER: 3}}


def test_tools_name_members_that_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = encode_state({"phase": Left.OVER}, "own")
    monkeypatch.delattr(sys.modules[__name__], "Left")
    found = decode_state(tree, b"")
    assert found == {"phase": AbsentMember(__name__, "Left", "OVER")}
    assert encode_state(found, "own")[0] == tree


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (Phase.HOT, "Phase.HOT"),
        (Split.TRAIN, "Split.TRAIN"),
        (Loop.Mode.QUICK, "Mode.FAST"),
        ((Phase.HOT, ("a", Split.TRAIN), 1), "(Phase.HOT, ('a', Split.TRAIN), 1)"),
    ],
)
def test_names_in_tools_are_the_same_without_the_class(
    key: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = encode_key(key)
    assert key_name(decode_key(tree)) == name
    for kind in ("Phase", "Split", "Loop"):
        monkeypatch.delattr(sys.modules[__name__], kind)
    assert decode_key(tree) != key
    assert key_name(decode_key(tree)) == name


@pytest.mark.parametrize("key", ["a", 1, 0.5, None, True, (), (1,), ("a", (None, 2))], ids=repr)
def test_other_keys_are_named_as_python_shows_them(key: object) -> None:
    assert key_name(key) == str(key)


def test_values_json_shows_members() -> None:
    class Head:
        id, step = "one", 1

    class Chain:
        head = Head

    chain: Any = Chain
    document = json.loads(values_json(chain, {"own": [Loop.Mode.FAST, Split.TRAIN]}, {}))
    assert document["values"]["own"] == [{"enum": [__name__, "Loop.Mode", "FAST"]}, "train"]


def local() -> Enum:
    """Return a member of an enumeration that no module holds."""

    class Own(Enum):
        ONE = 1

    return Own.ONE


@pytest.mark.parametrize("value", [Parts.ROWS | Parts.DENSE, Parts(0), local()], ids=repr)
def test_what_has_no_name_of_its_own_is_refused(value: Enum) -> None:
    with pytest.raises(UnsupportedState, match=r"own\.k is a .*enumeration that its module holds"):
        encode_state({"k": value}, "own")
    with pytest.raises(UnsupportedState, match="has the key"):
        encode_state({value: 1}, "own")


@pytest.mark.parametrize(
    "content",
    [
        *("x", ["a", "b"], ["a", "b", 1], ["a", "b", "c", "d"], [["a"], "b", "c"], None),
    ],
    ids=repr,
)
def test_malformed_members_are_refused(content: object) -> None:
    with pytest.raises(ValueError, match="is not a member of an enumeration"):
        check_tree({"enum": content}, 0)
    with pytest.raises(ValueError, match="is not a"):
        check_tree({"d": [[{"enum": content}, {"v": 1}]]}, 0)


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [
        ("os", "system", "x"),
        ("os", "path.join", "x"),
        ("builtins", "int", "real"),
        ("pathlib", "Path", "home"),
        (__name__, "Phase", "__class__"),
        (__name__, "Phase.WARM", "HOT"),
        (__name__, "again", "x"),
        ("a.module.that.nobody.imports", "Kind", "NAME"),
        ("", "", ""),
    ],
)
def test_nothing_but_members_is_found(module: str, kind: str, name: str) -> None:
    node = {"enum": [module, kind, name]}
    check_tree(node, 0)
    assert decode_state(node, b"") == AbsentMember(module, kind, name)
    remedy = "no such member" if module in sys.modules else f"import {module} before"
    with pytest.raises(IncompatibleCheckpoint, match=remedy):
        require_members({"own": [{"d": [["k", {"l": [node]}]]}]})


def test_members_of_another_script_are_to_be_imported_into_this_one() -> None:
    node = {"enum": ["__main__", "Outer.Phase", "WARM"]}
    with pytest.raises(IncompatibleCheckpoint, match="import Outer into this one before restore"):
        require_members({"own": [node]})


def test_nothing_is_imported_for_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "side_effect.py").write_text("import os\nos.environ['IMPORTED'] = '1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    decode_state({"enum": ["side_effect", "Kind", "NAME"]}, b"")
    assert "IMPORTED" not in os.environ
    assert "side_effect" not in sys.modules
