"""Attack a chain of checkpoints: each change comes with the words of the error that refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zstandard

from tests.unit.forgery import Forged, ForgedFile
from torchrec_checknrun.format.checks import VALUES
from torchrec_checknrun.format.chunk import DECODED_BYTES

HUGE = 2**50
EXCEPTIONS = {"rows": 2**40, "bytes": 0}
BOMB = zstandard.ZstdCompressor().compress(bytes(DECODED_BYTES + 8))
ENDLESS = b"\x28\xb5\x2f\xfd\xc0\x00" + (2**40).to_bytes(8, "little") + b"\x01\x00\x00"
"""A zstd frame that claims a terabyte."""

Attack = Callable[[list[Forged]], None]
ATTACKS: list[tuple[str, str, Attack]] = []


def named(words: str) -> Callable[[Attack], Attack]:
    """Register an attack with a pattern of the error's words."""

    def register(change: Attack) -> Attack:
        ATTACKS.append((change.__name__, words, change))
        return change

    return register


def head(change: Callable[[dict[str, Any]], None]) -> Attack:
    return lambda chain: chain[-1].change_manifest(change)


def rows_of(forged: Forged) -> dict[str, Any]:
    return next(
        e for file in forged.files.values() for e in file.index["chunks"] if e["kind"] == "rows"
    )


def state_of(forged: Forged) -> dict[str, Any]:
    return next(e for e in forged.entries if e["kind"] == "state")


def in_manifest(name: str, words: str, **fields: Any) -> None:
    ATTACKS.append((name, words, head(lambda manifest: manifest.update(fields))))


def in_table(name: str, words: str, **fields: Any) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tables"]["ebc.embedding_bags.t"].update(fields)

    ATTACKS.append((f"table_{name}", words, head(change)))


def in_rows(name: str, words: str, *path: Any, value: Any) -> None:
    def change(chain: list[Forged]) -> None:
        node = rows_of(chain[-1])
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    ATTACKS.append((f"rows_{name}", words, change))


def in_state(name: str, words: str, tree: Any) -> None:
    def change(chain: list[Forged]) -> None:
        state_of(chain[-1])["tree"] = tree

    ATTACKS.append((f"state_{name}", words, change))


def nested(depth: int, letter: str = "l") -> Any:
    tree: Any = {"v": 1}
    for _ in range(depth):
        tree = {letter: [tree]}
    return tree


in_manifest("path_in_id", r"Expected `str` matching regex .* at `\$\.id`", id="../../etc")
in_manifest("other_id", "it was moved or copied", id="elsewhere")
in_manifest(
    "parent_outside",
    r"`str` matching regex .* at `\$\.parent\.id`",
    parent={"id": "../x", "checksum": "0"},
)
in_manifest(
    "parent_is_absent", "needs gone, which can't be used", parent={"id": "gone", "checksum": "0"}
)
in_manifest("negative_step", r"Expected `int` >= 0 - at `\$\.step`", step=-1)
in_manifest("huge_step", r"Expected `int` <= 9223372036854775807 - at `\$\.step`", step=10**300)
in_manifest("no_time", "created_at: 'yesterday' is not ISO 8601", created_at="yesterday")
in_manifest("local_time", "with a time zone", created_at="2024-02-03T04:05:06")
in_manifest("other_sequence", "has sequence number 1", sequence=1)
in_manifest("fractions_of_text", "earlier_fractions", earlier_fractions=["x"])
in_manifest("unknown_field", "unknown fields", run_this="rm -rf /")
in_manifest(
    "states_of_numbers",
    r"Expected `bool`, got `int` - at `\$\.states\[\.\.\.\]`",
    states={"model": 1},
)
in_table("negative_rows", r"`int` >= 0 - at `\$\.tables\[\.\.\.\]\.rows`", rows=-1)
in_table("other_rows", "hold different tables", rows=HUGE)
in_table("huge_error", r"Expected `int` <= .* - at `\$\.tables.*\.error_mean`", error_mean=10**300)
in_table("codec_tree", r"got `array` - at `\$\.tables.*\.codecs\[0\]", codecs=[{"name": [[[]]]}])
in_rows("no_table", r"Expected `str`, got `int` - at `\$\.table`", "table", value=5)
in_rows("huge_count", "rows in", "count", value=2**40)
in_rows("negative_first", r"Expected `int` >= 0 - at `\$\.first`", "first", value=-1)
in_rows("outside_the_table", "of a table", "last", value=HUGE)
in_rows("columns_turned", "of a table", "columns", value=[4, 0])
in_rows("columns_of_three", r"length 2, got 3 - at `\$\.columns`", "columns", value=[0, 1, 2])
in_rows("offset_before", r"Expected `int` >= 0 - at `\$\.offset`", "offset", value=-8)
in_rows("offset_of_another", "begins at 7, but the previous one ends at 0", "offset", value=7)
in_rows("length_of_a_terabyte", "more than the 2147483648 that are read", "length", value=2**40)
in_rows("shorter_length", "the sections have", "length", value=8)
in_rows("no_checksum", r"Expected `str`, got `array` - at `\$\.checksum`", "checksum", value=["x"])
in_rows("other_kind", "chunks of kind 'pickle' are unknown", "kind", value="pickle")
in_rows(
    "dtype_of_objects",
    r"enum value 'object' - at `\$\.weight\.dtype`",
    "weight",
    "dtype",
    value="object",
)
in_rows("other_dtype", "was saved as torch.float64", "weight", "dtype", value="float64")
in_rows(
    "codec_is_a_list",
    r"Expected `object`, got `array` - at `\$\.weight\.codec`",
    "weight",
    "codec",
    value=[],
)
in_rows("codec_of_tomorrow", "codec 'eval' is unknown", "weight", "codec", value={"name": "eval"})
in_rows("codec_bits", "bits must be one of", "weight", "codec", "bits", value=10**18)
in_rows("exponent", "is no exponent", "weight", "parameters", value={"exponent": 2**62})
in_rows(
    "parameters_deep",
    r"got `object` - at `\$\.weight\.parameters",
    "weight",
    "parameters",
    value={"a": {"b": {}}},
)
in_rows(
    "negative_bytes", r"Expected `int` >= 0 - at `\$\.weight\.bytes`", "weight", "bytes", value=-1
)
in_rows("claims_to_unpack", "claims .* bytes, more than", "weight", "raw", value=2**40)
in_rows(
    "more_exceptions", "exact rows of", "weight", "exceptions", value={"rows": 2**40, "bytes": 0}
)
in_rows("ids_encoding", "unknown encoding", "ids", "encoding", value="pickle")
in_rows("state_twice", "appears twice|the sections have", "optimizer", 1, "name", value="momentum1")
in_rows(
    "state_scheme", "is not stored as|log8", "optimizer", 0, "encoding", value={"scheme": "zip"}
)
in_rows(
    "state_rowlog8",
    "stored as rowlog8 take",
    "optimizer",
    1,
    "encoding",
    value={"scheme": "rowlog8"},
)
in_rows(
    "rowwise_of_text",
    r"Expected `bool`, got `str` - at `\$\.optimizer\[0\]\.rowwise`",
    "optimizer",
    0,
    "rowwise",
    value="no",
)
in_state("too_deep", "nested more than 100 deep", nested(101))
in_state("recursion", "nested too deeply|nested more than 100 deep", nested(400))
in_state("no_node", "is not a node", {"pickle": "x"})
in_state("two_letters", "is not a node", {"v": 1, "f": "0x1.0p+0"})
in_state(
    "other_key_twice",
    "key True appears twice",
    {"d": [[1, {"v": 1}], [{"v": True}, {"v": 2}]]},
)
in_state("key_of_a_list", "is not a key", {"d": [[{"l": []}, {"v": 1}]]})
in_state("key_twice", "key 'a' appears twice", {"d": [["a", {"v": 1}], ["a", {"v": 2}]]})
in_state("key_of_list", "is not a key", {"d": [[["a"], {"v": 1}]]})
in_state("huge_float", "is not a node", {"f": "0x1.0p+99999999999"})
in_state("float_beyond", "too large a number", {"f": "0x1.0p+9999"})
in_state(
    "bytes_nowhere",
    r"Expected `array`, got `null` - at `\$\.x`",
    {"x": None, "dtype": "int8", "shape": [1]},
)
in_state("outside", "ends at byte", {"b": [0, HUGE]})
in_state("negative_offset", r"Expected `int` >= 0 - at `\$\.b\[0\]`", {"b": [-1, 1]})
in_state("empty_giant", "is too large", {"x": [0, 0], "dtype": "float32", "shape": [0, HUGE, HUGE]})
in_state(
    "negative_shape",
    r"Expected `int` >= 0 - at `\$\.shape\[0\]`",
    {"x": [0, 8], "dtype": "float32", "shape": [-2, -1]},
)
in_state("shape_bytes", "take .* bytes, not", {"x": [0, 8], "dtype": "float32", "shape": [HUGE]})
in_state("many_dimensions", "is too large", {"x": [0, 8], "dtype": "int8", "shape": [1] * 5000})
in_state(
    "dtype_code",
    "is not a dtype",
    {"n": [0, 8], "dtype": "i4,(9,9)f8", "shape": [1], "scalar": False},
)
in_state("the_same_bytes", "but the previous one ends", {"l": [{"b": [0, 4]}, {"b": [0, 4]}]})
in_state("set_of_lists", "has no hash", {"set": [{"l": []}]})
in_state("set_of_tuples_of_lists", "has no hash", {"set": [{"t": [{"t": [{"d": []}]}]}]})
in_state("set_of_sets", "has no hash", {"frozenset": [{"set": []}]})
in_state("set_of_slices", "has no hash", {"set": [{"slice": [{"v": 1}, {"v": 2}, {"v": 3}]}]})
in_state("set_of_bytes", "is not a node", {"set": "abc"})
in_state("member_twice", "2 members make a set of 1", {"set": [{"v": 1}, {"f": "0x1.0p+0"}]})
in_state("complex_of_one", "are not 2 parts", {"complex": ["0x1.0p+0"]})
in_state("complex_of_text", "invalid hexadecimal|is not a number", {"complex": ["os", "system"]})
in_state("complex_beyond", "too large a number", {"complex": ["0x1.0p+9999", "0x1.0p+0"]})
in_state("dtype_of_a_module", "is not a dtype", {"torch.dtype": "load"})
in_state("dtype_of_a_list", "is not a dtype", {"torch.dtype": ["float32"]})
in_state("size_of_text", "is not an integer", {"torch.Size": ["x"]})
in_state("size_beyond", "is not an integer", {"torch.Size": [2**63]})
in_state("range_beyond", "is not an integer", {"range": [0, 2**70, 1]})
in_state("range_of_four", "are not 3 parts", {"range": [0, 1, 1, 1]})
in_state("range_of_no_steps", "steps of 0", {"range": [0, 5, 0]})
in_state("range_of_flags", "is not an integer", {"range": [False, True, True]})
in_state("slice_of_code", "not a part of a slice", {"slice": [{"v": 1}, {"eval": "1"}, {"v": 1}]})
in_state("slice_of_slices", "not a part of a slice", {"slice": [{"slice": []}, {"v": 1}, {"v": 1}]})
in_state("path_of_numbers", "is not a path", {"Path": 5})
in_state("path_of_another_kind", "is not a node", {"WindowsPath": "c:"})
in_state("deque_of_fewer", "is not a node", {"l": [{"v": 1}], "maxlen": 0})
in_state("deque_of_less_than_none", "is not a node", {"l": [], "maxlen": -1})
in_state("deque_of_true", "is not a node", {"l": [], "maxlen": True})
in_state("dict_of_no_kind", "is not a node", {"d": [], "kind": "UserDict"})
in_state("dict_of_many_kinds", "is not a node", {"d": [], "kind": ["Counter"]})
in_state("list_of_a_kind", "is not a node", {"l": [], "kind": "Counter"})
in_state("whole_dict_of_a_kind", "is not a node", {"d": [], "kind": "Counter", "whole": True})
in_state("list_with_more", "is not a node", {"l": [], "other": None})
in_state("tuple_with_an_end", "is not a node", {"t": [], "maxlen": None})
in_state("deque_backwards", "is not a node", {"maxlen": 1, "l": []})
in_state("deque_of_no_list", "is not a node", {"l": 5, "maxlen": None})
in_state("no_date", "Invalid isoformat|month must be", {"date": "2026-13-01"})
in_state("long_time", "is not a time", {"time": "9" * 70})
in_state("long_timedelta", "too long a time", {"timedelta": [10**12, 0, 0]})
in_state("no_device", "is not a device", {"torch.device": "nonsense"})
in_state("two_kinds", "is not a node", {"complex": ["0x0p+0", "0x0p+0"], "range": [0, 1, 1]})


def in_block(name: str, words: str, **fields: Any) -> None:
    def change(chain: list[Forged]) -> None:
        block_of(chain[-1]).update(fields)

    ATTACKS.append((f"block_{name}", words, change))


def block_of(forged: Forged) -> dict[str, Any]:
    return next(e for e in forged.entries if e["kind"] == "block")


in_block("of_a_terabyte", "is too large", size=[2**30, 2**30, 2**30])
in_block("of_no_size_but_giant", "is too large", size=[0, 2**62, 2**62])
in_block("of_many_dimensions", "is too large", size=[1] * 5000)
in_block("beyond", "is not within", part=[[0, 5], [0, 3], [0, 2]])
in_block("turned", "is not within", part=[[2, 1], [0, 3], [0, 2]])
in_block(
    "negative", r"Expected `int` >= 0 - at `\$\.part\[0\]\[0\]`", part=[[-1, 1], [0, 3], [0, 2]]
)
in_block("flat", "spans for 3 dimensions", part=[[0, 4]])
in_block(
    "of_triples", r"length 2, got 3 - at `\$\.part\[0\]`", part=[[0, 1, 2], [0, 3, 1], [0, 2, 1]]
)
in_block("outside_its_shard", "is not within", shard=[[1, 3], [0, 3], [0, 2]])
in_block("other_dtype", "bytes for", dtype="int8")
in_block("dtype_of_objects", "dtype 'object'", dtype="object")
in_block("without_a_path", "a path of 0 keys", path=[])
in_block("deep_path", "a path of 5000 keys", path=["x"] * 5000)
in_block("key_of_a_list", r"got `array` - at `\$\.path\[1\]`", path=["model", ["x"]])
in_block("long_names", "of several sizes or types|are missing", path=["model", "x" * 4000])
in_block("other_size", "several sizes or types", size=[4, 3, 9])


@named("or some twice: pieces are missing")
def a_block_twice(chain: list[Forged]) -> None:
    block = block_of(chain[-1])
    other = next(e for e in chain[-1].entries if e["kind"] == "block" and e["part"][0] == [3, 4])
    other |= {"part": [[2, 3], *block["part"][1:]], "shard": block["shard"]}


@named("needs seq-000003.* it was replaced")
def parent_of_itself(chain: list[Forged]) -> None:
    chain[-1].manifest["parent"]["id"] = chain[-1].folder


@named("it was replaced")
def parents_in_a_circle(chain: list[Forged]) -> None:
    last = {"id": chain[-1].folder, "checksum": "0" * 32}
    chain[0].manifest |= {"kind": "differential", "parent": last}


@named("has a name twice")
def a_file_twice(chain: list[Forged]) -> None:
    chain[-1].change_manifest(lambda manifest: manifest["files"].append(manifest["files"][0]))


@named(r"`str` matching regex .* at `\$\.files\[0\]\.name`")
def a_file_elsewhere(chain: list[Forged]) -> None:
    chain[-1].change_manifest(lambda manifest: manifest["files"][0].update(name="/etc/passwd"))


@named("don't end a file")
def an_index_of_a_terabyte(chain: list[Forged]) -> None:
    chain[-1].change_manifest(lambda manifest: manifest["files"][0].update(index_length=2**40))


@named("chunks, where the manifest says")
def more_chunks(chain: list[Forged]) -> None:
    chain[-1].change_manifest(lambda manifest: manifest["files"][0].update(chunks=10**9))


@named("but the previous one ends")
def a_chunk_twice(chain: list[Forged]) -> None:
    chain[-1].entries.append(chain[-1].entries[0])


@named("the chunks end at")
def bytes_of_no_chunk(chain: list[Forged]) -> None:
    chain[-1].first.payload += b"more"


@named("is malformed: 'utf-8' codec can't decode")
def an_index_in_latin_1(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = '{"rank":0,"chunks":["é"]}'.encode("latin-1")


@named("the key 'rank' appears twice")
def a_key_twice(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = b'{"rank":0,"rank":1,"chunks":[]}'


@named("NaN is not a number")
def not_a_number(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = b'{"rank":NaN,"chunks":[]}'


@named("1e999.* is too large a number")
def beyond_floats(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = b'{"rank":1e999,"chunks":[]}'


@named("nested too deeply")
def deep_json(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = b"[" * 100_000


@named("is not a manifest.*nested too deeply")
def a_deep_manifest(chain: list[Forged]) -> None:
    chain[-1].raw_manifest = lambda data: b'{"manifest":' * 100_000


@named("is not a manifest.*more than the 33554432 that are read")
def a_huge_manifest(chain: list[Forged]) -> None:
    chain[-1].raw_manifest = lambda data: bytes(33 << 20)


@named("values, more than the")
def an_index_of_empty_lists(chain: list[Forged]) -> None:
    chain[-1].first.raw_index = b'{"rank":0,"chunks":[' + b"[]," * (VALUES // 2) + b"[]]}"


@named("at most .* are read")
def rows_that_no_bytes_stand_for(chain: list[Forged]) -> None:
    """Claim a full table of 2**50 rows, from a few bytes."""
    of_table(chain, HUGE, zstandard.ZstdCompressor().compress(bytes(4096)), 4 * HUGE)


@named("holds 60 of the 1125899906842624 rows")
def a_table_that_is_not_there(chain: list[Forged]) -> None:
    for forged in chain:
        forged.change_manifest(
            lambda manifest: manifest["tables"]["ebc.embedding_bags.t"].update(rows=HUGE)
        )


@named("holds 480 of the .* values of ebc.embedding_bags.t; .* of 8 to 4611686018427387903")
def columns_that_are_not_there(chain: list[Forged]) -> None:
    for forged in chain:
        forged.change_manifest(lambda m: m["tables"]["ebc.embedding_bags.t"].update(dim=2**62))


@named("that are in another chunk as well, so that others are missing")
def rows_of_another_chunk(chain: list[Forged]) -> None:
    for file in chain[0].files.values():
        for entry in file.index["chunks"]:
            if entry.get("first") == 40:
                entry |= {"first": 20, "last": 39}


@named("bytes: at most 67108864 are read")
def a_bomb(chain: list[Forged]) -> None:
    of_table(chain, (DECODED_BYTES + 8) // 4, BOMB, DECODED_BYTES + 8)


@named("a frame of 1099511627776 bytes, where 65536 to 65536 are possible")
def a_frame_that_claims_more(chain: list[Forged]) -> None:
    of_table(chain, 1 << 14, ENDLESS, 1 << 16)


def of_table(chain: list[Forged], rows: int, packed: bytes, raw: int) -> None:
    """Reduce the chain to a full checkpoint of a table of one column, in one chunk."""
    del chain[1:]
    entry = {
        "kind": "rows",
        "table": "ebc.embedding_bags.t",
        "table_rows": rows,
        "table_dim": 1,
        "columns": [0, 1],
        "first": 0,
        "last": rows - 1,
        "count": rows,
        "ids": {"encoding": "range", "bytes": 0},
        "weight": {
            "codec": {"name": "exact", "version": 1},
            "dtype": "float32",
            "value_bits": 32,
            "bytes": len(packed),
            "raw": raw,
        },
        "optimizer": [],
        "offset": 0,
        "length": len(packed),
        "checksum": "",
    }
    name = next(iter(chain[0].files))
    chain[0].files = {name: ForgedFile(bytearray(packed), {"rank": 0, "chunks": [entry]})}
    table = {"rows": rows, "dim": 1, "stored_values": rows}
    chain[0].change_manifest(lambda m: m["tables"]["ebc.embedding_bags.t"].update(table))
