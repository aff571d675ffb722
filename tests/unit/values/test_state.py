"""Return state objects unchanged, without pickle; refuse other objects by their key."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.entries import decode_stored
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedState
from torchrec_checknrun.format.chunk import state_chunk
from torchrec_checknrun.values.state import decode_state, encode_state

TENSOR_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
NUMPY_DTYPES = [
    *("?", "i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u8", "<f2", ">f4", "<f8", "<c8"),
    *("S3", "<M8[s]", ">M8[ns]", "<m8[D]"),
]


def round_trip(value: object) -> Any:
    """Send a value to storage and back: the tree as JSON in an index, the pieces as bytes."""
    tree, pieces = encode_state(value, "state")
    return decode_state(json.loads(json.dumps(tree)), b"".join(pieces))


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def assert_same(actual: object, wanted: object) -> None:
    """Compare to the bit, types included."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        assert raw(actual) == raw(wanted.resolve_conj())
        return
    assert type(actual) is type(wanted)
    if isinstance(wanted, dict):
        assert isinstance(actual, dict)
        assert getattr(actual, "default_factory", 0) is getattr(wanted, "default_factory", 0)
        assert [(k, type(k)) for k in actual] == [(k, type(k)) for k in wanted]
        for key in wanted:
            assert_same(actual[key], wanted[key])
    elif isinstance(wanted, (list, tuple, deque)):
        assert isinstance(actual, (list, tuple, deque))
        assert getattr(actual, "maxlen", None) == getattr(wanted, "maxlen", None)
        assert len(actual) == len(wanted)
        for a, w in zip(actual, wanted, strict=True):
            assert_same(a, w)
    elif isinstance(wanted, (np.ndarray, np.generic)):
        little = np.asarray(wanted).astype(wanted.dtype.newbyteorder("<"))
        assert np.asarray(actual).dtype == little.dtype
        assert np.shape(np.asarray(actual)) == wanted.shape
        assert np.asarray(actual).tobytes() == little.tobytes()
    elif isinstance(wanted, float):
        assert isinstance(actual, float)
        assert float.hex(actual) == float.hex(wanted)
    else:
        assert actual == wanted


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    return torch.tensor(list(content), dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        content = bytes(byte & 1 for byte in content)
    return np.frombuffer(content, dtype).reshape(shape)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    tensors(),
    arrays(),
    arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
)
KEYS = st.one_of(
    st.text(),
    st.integers(),
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner | st.text() | st.integers(-5, 5), max_size=3).map(tuple),
        max_leaves=4,
    ),
)


def of_a_kind(items: dict[Any, Any], number: int) -> dict[Any, Any]:
    found: list[dict[Any, Any]] = [OrderedDict(), Counter(), defaultdict(list), defaultdict(), {}]
    found[number].update(items)
    return found[number]


STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.sampled_from([None, 0, 2, 9])),
        st.builds(of_a_kind, st.dictionaries(KEYS, inner, max_size=4), st.integers(0, 4)),
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(STATES)
def test_values_come_back(value: object) -> None:
    assert_same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**200,
        -(2**63) - 1,
        True,
        0.1,
        5e-324,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "grüße 表 \x00 \ud800",
        b"",
        bytes(range(256)),
        (),
        [],
        {},
        {1: "int", "1": "str", -5: None, "": 0},
        [[], (), {}, [()]],
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, -0.0]).conj(),
        torch.tensor([1.0, -2.0]).to(torch.bfloat16),
        np.float32(0.1),
        np.float64(0.1),
        np.int64(-7),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.array(5),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.zeros((2, 0), bool),
        np.array(["a", "grüße", ""]),
        np.array([["a\0b"], ["c"]], ">U4"),
        np.array([b"a", b"bc\0"]),
        np.array([], "U7"),
        np.str_("text"),
        np.bytes_(b"text"),
        np.array(["2024-01-01", "NaT"], "M8[D]"),
        np.datetime64("2024-01-01T12:00:00.123456789"),
        np.timedelta64(5, "ms"),
        deque([torch.ones(2), "x"], maxlen=3),
        deque([1.5]),
        deque(maxlen=0),
        Counter("abca"),
        Counter({"up": 0, "down": -5}),
        OrderedDict([("b", 1), ("a", Counter())]),
        defaultdict(int, {5: 1}),
        defaultdict(Counter, a=Counter(x=2)),
        defaultdict(None, a=1),
    ],
    ids=repr,
)
def test_values_that_are_easy_to_get_wrong(value: object) -> None:
    assert_same(round_trip({"key": [value]}), {"key": [value]})


def test_a_loaded_value_owns_its_memory() -> None:
    value = {"tensor": torch.zeros(4), "array": np.zeros(4), "other": torch.zeros(4)}
    loaded = round_trip(value)
    loaded["tensor"] += 1
    loaded["array"] += 1
    assert loaded["other"].tolist() == [0, 0, 0, 0]


def test_only_what_a_view_shows_is_stored() -> None:
    base = torch.arange(1_000_000, dtype=torch.float32)
    views = {
        "slice": base[10:14],
        "column": base.view(1000, 1000)[:3, 7],
        "t": base[:6].view(2, 3).t(),
    }
    tree, pieces = encode_state(views, "state")
    assert sum(memoryview(piece).nbytes for piece in pieces) < 1000
    assert_same(decode_state(tree, b"".join(pieces)), views)
    assert_same(round_trip(base[:1].expand(5)), base[:1].repeat(5))
    one = base.view(1000, 1000)[4:5, 7]  # contiguous, but with a stride
    assert round_trip(one).tolist() == one.tolist() == [4007.0]


FLOATS = {"x": [0, 16], "dtype": "float32"}
STRIDES: list[Any] = [[1], [1, 1], [0, 1], [1, 4], [-1, 2], [2**40, 1], ["1", 2], "12", [1.0, 2]]
"""Strides that leave gaps between the values of two by two, share places, or are no numbers."""
LAYOUTS: dict[str, Callable[[], Any]] = {
    "columns": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one channel": lambda: torch.rand(2, 1, 4, 5).contiguous(memory_format=torch.channels_last),
    "bf16": lambda: torch.rand(3, 4, dtype=torch.bfloat16).t(),
    "fp8": lambda: torch.rand(3, 4).to(torch.float8_e4m3fn).t(),
    "permuted": lambda: torch.rand(2, 3, 4).permute(1, 2, 0),
    "array": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "permuted array": lambda: np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_order_in_memory_comes_back(name: str) -> None:
    """Sums over a column-major tensor add up its values in another order than over rows."""
    value = LAYOUTS[name]()
    chunk = state_chunk("reader", None, *encode_state({"v": [value]}, "reader"))
    found = decode_stored(chunk.entry, chunk.getvalue())["v"][0]
    assert_same(found, value)
    tensor = isinstance(value, torch.Tensor)
    assert (found.stride() == value.stride()) if tensor else (found.strides == value.strides)


def test_leaves_are_aligned() -> None:
    tree, _ = encode_state([b"x", torch.zeros(2), np.zeros(3), b""], "state")
    offsets = [span[0] for node in tree["l"] for letter, span in node.items() if letter in "bxn"]
    assert len(offsets) == 4
    assert all(offset % 64 == 0 for offset in offsets)


class Settings(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [Settings(a=1), torch.nn.BatchNorm1d(2).state_dict(), defaultdict(lambda: 1, a=1)],
    ids=["of a user", "of a module", "of a function"],
)
def test_other_dicts_come_back_plain(value: dict[str, Any]) -> None:
    assert_same(round_trip(value), dict(value))


def test_a_factory_with_a_type_s_name_is_not_that_type() -> None:
    def int() -> str:
        return "x"

    assert type(round_trip(defaultdict(int))) is dict


def test_parameters_come_back_as_tensors() -> None:
    loaded = round_trip({"weight": torch.nn.Parameter(torch.ones(2))})
    assert type(loaded["weight"]) is torch.Tensor
    assert not loaded["weight"].requires_grad


class Name(str):
    __slots__ = ()


class Window(deque[int]):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "make",
    [
        lambda: print,
        lambda: object(),
        lambda: bytearray(b"x"),
        lambda: Name("x"),
        lambda: Point(1, 2),
        lambda: np.array([{}], dtype=object),
        lambda: np.zeros(2, [("a", "i4")]),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: np.asmatrix([[1.0, 2.0]]),
        lambda: Window([1]),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.Generator(),
    ],
)
def test_what_needs_pickle_is_refused_by_its_key(make: Callable[[], object]) -> None:
    with pytest.raises(UnsupportedState, match=r"^reader\.files\[1\]\.last is a "):
        encode_state({"files": ["a", {"last": make()}]}, "reader")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", [lambda n: [n], lambda n: {n: 1}, lambda n: {n}])
def test_integers_that_python_does_not_read_are_refused_by_their_key(
    form: Callable[[int], object], sign: int
) -> None:
    least = 2**14284  # Python reads up to 4,300 digits
    assert round_trip(form(sign * (least - 1))) == form(sign * (least - 1))
    with pytest.raises(UnsupportedState, match=r"reader\.seen.*digits.*bytes"):
        encode_state({"seen": form(sign * least)}, "reader")


NESTED = ((((((((((1,),),),),),),),),),)


@pytest.mark.parametrize(
    "key",
    [b"x", Name("x"), math.nan, (1, b"x"), (2**70,), (Point(1, 2),), 1j, NESTED],
    ids=repr,
)
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(UnsupportedState, match=r"^reader\.files has the key .*must be str, int"):
        encode_state({"files": {key: 1}}, "reader")


@pytest.mark.parametrize("key", [np.int64(3), np.float32(0.1), np.str_("x"), np.bool_(True)])
def test_keys_of_numpy_become_those_of_python(key: Any) -> None:
    found = round_trip({key: 1})
    assert found == {key: 1}
    assert [type(k) for k in found] == [type(key.item())]
    pairs = round_trip({(key, (key, "a")): 1})
    assert pairs == {(key, (key, "a")): 1}
    assert [type(k[0]) for k in pairs] == [type(k[1][0]) for k in pairs] == [type(key.item())]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"z": 1},
        {"l": [5]},
        {"l": 5},
        {"datetime": "2026"},
        {"datetime": 5},
        {"date": "2026-13-01"},
        {"time": "9" * 70},
        {"timedelta": [10**12, 0, 0]},
        {"timedelta": [1, 0]},
        {"timedelta": [1, 0, 0.5]},
        {"torch.device": "a:b"},
        {"torch.device": "nonsense"},
        {"torch.device": 0},
        {"n": [0, 16], "dtype": "<U5", "shape": [1], "scalar": False},
        {"n": [0, 16], "dtype": "<M8[x]", "shape": [2], "scalar": False},
        {"n": [0, 0], "dtype": "<U9999999999", "shape": [0], "scalar": False},
        {"d": [[1.5, {"v": 1}]]},
        {"d": [[{"v": 1}, {"v": 1}]]},
        {"d": [[{"v": "a"}, {"v": 1}]]},
        {"d": [[{"f": "nan"}, {"v": 1}]]},
        {"d": [[{"t": 5}, {"v": 1}]]},
        {"d": [[{"t": [{"b": [0, 1]}]}, {"v": 1}]]},
        {"d": [[{"v": None, "f": "0x0p+0"}, {"v": 1}]]},
        {"d": [[{"l": []}, {"v": 1}]]},
        {"d": [["a"]]},
        {"d": [[["a"], {"v": 1}]]},
        {"f": "zero"},
        {"f": 1},
        {"b": [0, 17]},
        {"b": [-1, 1]},
        {"b": [0, True]},
        {"b": [0]},
        {"b": None},
        {"x": [0, 16], "dtype": "float32", "shape": [5]},
        {"x": [0, 16], "dtype": "quint8", "shape": [16]},
        {"x": [0, 16], "dtype": "float32", "shape": [-2, -2]},
        {"x": [0, 16], "dtype": "float32"},
        {"n": [0, 16], "dtype": "<f4", "shape": [5], "scalar": False},
        {"n": [0, 16], "dtype": "|O", "shape": [2], "scalar": False},
        {"n": [0, 16], "dtype": "nonsense", "shape": [2], "scalar": False},
        {"n": [0, 16], "dtype": "<f4", "shape": [4]},
        *({**FLOATS, "shape": [2, 2], "strides": s} for s in STRIDES),
        {**FLOATS, "shape": [], "strides": [1]},
        {**FLOATS, "shape": [4, 0], "strides": [1, 1]},
        {"n": [0, 16], "dtype": "<f4", "shape": [2, 2], "scalar": False, "strides": [1, 1]},
    ],
    ids=repr,
)
def test_a_malformed_tree(tree: dict[str, Any]) -> None:
    entry = {"kind": "state", "name": "reader", "rank": None, "tree": tree}
    with pytest.raises(CorruptCheckpoint):
        decode_stored(entry, bytes(16))


def test_an_entry_without_a_tree() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"state chunk is malformed: .* `tree`"):
        decode_stored({"kind": "state", "name": "reader", "rank": None}, b"")


@settings(max_examples=examples(100), deadline=None)
@given(STATES, st.data())
def test_a_payload_cut_short_is_noticed(value: object, data: st.DataObject) -> None:
    chunk = state_chunk("reader", None, *encode_state(value, "reader"))
    payload = chunk.getvalue()
    assert_same(decode_stored(chunk.entry, payload), value)
    if payload:
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(CorruptCheckpoint):
            decode_stored(chunk.entry, payload[:cut])
