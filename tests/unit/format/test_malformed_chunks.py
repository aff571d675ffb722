"""Refuse entries and bytes of a chunk that don't match; crash a reader by no field."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.entries import decode_rows, header_of
from tests.unit.format.shards import encode, make_shard, stored
from torchrec_checknrun.codecs import Codec, Exact, Rowwise
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedFormat

pytestmark = pytest.mark.usefixtures("either_kernel")


def example(codec: Codec | None = None) -> tuple[dict[str, Any], bytes]:
    states = {"momentum1": (torch.float32, True), "exp_avg_sq": (torch.float16, False)}
    shard = make_shard(50, 8, 10, 8, states=states)
    rows = shard.gather(torch.tensor([12, 13, 17, 40]))
    return stored(encode(shard, rows, codec or Exact()))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 500), st.binary(max_size=5))
def test_a_payload_of_another_length(length: int, more: bytes) -> None:
    entry, payload = example(Rowwise(8))
    wrong = payload[:length] + more
    if len(wrong) != len(payload):
        with pytest.raises(CorruptCheckpoint, match=f"should have {len(payload)} bytes, not"):
            decode_rows(entry, wrong)


def test_ids_that_dont_fit() -> None:
    entry, payload = example()
    with pytest.raises(CorruptCheckpoint, match="don't encode 4 distinct rows from 12 to 40"):
        decode_rows(entry, b"\xff" + payload[1:])


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(entry: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        node: Any = entry
        for key in outer:
            node = node[int(key) if key.isdigit() else key]
        if value == "missing":
            del node[last]
        else:
            node[last] = value

    apply.__name__ = f"{path}={value!r}"
    return apply


MALFORMED = [
    *(
        change(key, "missing")
        for key in [
            "table",
            "table_rows",
            "table_dim",
            "columns",
            "first",
            "last",
            "count",
            "ids",
            "weight",
            "optimizer",
            "ids.bytes",
            "ids.encoding",
            "weight.codec",
            "weight.dtype",
            "optimizer.0.name",
            "optimizer.0.dtype",
            "optimizer.1.rowwise",
        ]
    ),
    change("table_rows", 40),
    change("table_rows", -1),
    change("table_rows", "65"),
    change("table_dim", 15),
    change("table_dim", 8.0),
    change("columns", [8]),
    change("columns", [8, 16, 24]),
    change("columns", [16, 8]),
    change("columns", [8, 8]),
    change("columns", 8),
    change("first", 41),
    change("first", -12),
    change("first", None),
    change("last", 2**40),
    change("last", True),
    change("count", 0),
    change("count", 30),
    change("count", 5),
    change("ids", None),
    change("ids.bytes", -1),
    change("ids.bytes", "4"),
    change("ids.encoding", "runs"),
    change("ids.encoding", ["bitmap"]),
    change("weight", []),
    change("weight.dtype", "float64"),  # does not match the bytes
    change("weight.dtype", "uint8"),
    change("weight.dtype", ["float32"]),
    change("weight.codec", None),
    change("optimizer", None),
    change("optimizer", [5]),
    change("optimizer.0.dtype", "int64"),  # does not match the bytes
    change("optimizer.0.rowwise", False),
]


@pytest.mark.parametrize("damage", MALFORMED, ids=lambda damage: damage.__name__)
def test_malformed_entries_are_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    entry, payload = example()
    decode_rows(entry, payload)
    damage(entry)
    with pytest.raises(CorruptCheckpoint):
        decode_rows(entry, payload)


@pytest.mark.parametrize(
    "spec", [{"name": "zstd", "version": 1}, {"name": "exact", "version": 2}, {}]
)
def test_codecs_of_a_newer_release(spec: dict[str, Any]) -> None:
    entry, payload = example()
    entry["weight"]["codec"] = spec
    with pytest.raises(UnsupportedFormat):
        decode_rows(entry, payload)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.text(max_size=3), st.lists(st.integers(0, 9))
)


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), JUNK)
def test_no_field_can_crash_a_reader(data: st.DataObject, junk: object) -> None:
    """Decode an entry with a changed field to the promised shape, or refuse the entry."""
    entry, payload = example()
    entry = copy.deepcopy(entry)
    node: Any = entry
    while isinstance(node, (dict, list)) and node:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or data.draw(st.booleans()):
            node[key] = junk
            break
        node = node[key]
    try:
        decoded = decode_rows(entry, payload)
    except (CorruptCheckpoint, UnsupportedFormat):
        return
    header = header_of(entry)
    assert decoded.weight.shape == (header.count, header.rectangle.cols)
    assert len(decoded.ids) == header.count
    assert decoded.optimizer.keys() == header.optimizer.keys()
