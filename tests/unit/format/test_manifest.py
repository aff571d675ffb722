"""Return manifests as written, or refuse them: damage and other versions."""

import json
from datetime import timezone
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.examples import examples
from torchrec_checknrun.errors import CorruptCheckpoint, UnsupportedFormat
from torchrec_checknrun.format.losses import Loss
from torchrec_checknrun.format.manifest import (
    FORMAT_VERSION,
    Link,
    Manifest,
    RankFile,
    TableDigests,
    TableTotals,
    parse_manifest,
)
from torchrec_checknrun.format.names import (
    LAST_SEQUENCE,
    checkpoint_id,
    is_plain_name,
    new_id,
    sequence_of,
)

NAMES = st.text(min_size=1, max_size=12)
COUNTS = st.integers(0, 2**50)
TIMES = st.datetimes(timezones=st.just(timezone.utc))
PLAIN_NAMES = NAMES.filter(is_plain_name)
LINKS = st.builds(Link, PLAIN_NAMES, st.text("0123456789abcdef", min_size=32, max_size=32))
ERRORS = st.one_of(st.none(), st.floats(0, 1))
TABLES = st.builds(
    TableTotals,
    rows=COUNTS,
    dim=COUNTS,
    stored_values=COUNTS,
    weight_bytes=COUNTS,
    error_mean=ERRORS,
    error_max=ERRORS,
    error_rows=COUNTS,
)
LOSSES = st.builds(Loss, COUNTS, COUNTS, COUNTS, st.integers(1, 9), st.integers(1, 9))
FILES = st.builds(RankFile, PLAIN_NAMES, COUNTS, COUNTS, COUNTS, NAMES, COUNTS)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    parent = draw(st.one_of(st.none(), LINKS))
    return Manifest(
        id=draw(PLAIN_NAMES),
        sequence=draw(COUNTS),
        step=draw(COUNTS),
        kind="differential" if parent else "full",
        parent=parent,
        previous=draw(st.one_of(st.none(), LINKS)),
        world_size=draw(COUNTS),
        created_at=draw(TIMES).isoformat(),
        created_by=draw(NAMES),
        lossy_restores=draw(COUNTS),
        bits=draw(st.sampled_from([None, 8, 4, 2])),
        tables=draw(st.dictionaries(NAMES, TABLES, max_size=3)),
        states=draw(st.dictionaries(NAMES, st.booleans(), max_size=3)),
        dense_bytes=draw(COUNTS),
        files=tuple(draw(st.lists(FILES, max_size=3, unique_by=lambda file: file.name))),
        losses=tuple(draw(st.lists(LOSSES, max_size=2))),
    ).sealed()


EXAMPLE = Manifest(
    id="seq-000002_step-00000020_0123abcd",
    sequence=2,
    step=20,
    kind="differential",
    parent=Link("seq-000001_step-00000010_deadbeef", "0" * 32),
    previous=None,
    world_size=1,
    created_at="2024-02-03T04:05:06.789+00:00",
    created_by="torchrec_checknrun",
    lossy_restores=1,
    bits=8,
    tables={
        "täble": TableTotals(
            100, 8, 16, 32, 8, 4, 3600, 8, 1.5e-05, 0.01, 2, codecs=[{"name": "fp16"}]
        )
    },
    states={"model": False, "reader": True},
    dense_bytes=123,
    files=(RankFile("rank-00000.bin", 1000, 900, 68, "0" * 16, 3),),
).sealed()


def rewritten(change: dict[str, Any], **document: Any) -> bytes:
    """Return the example with other fields and a valid checksum, as a faulty writer would."""
    content = json.loads(
        json.dumps({**to_builtins(EXAMPLE), "losses": "missing", "deltas": "missing", **change})
    )
    del content["checksum"]
    content = {key: value for key, value in content.items() if value != "missing"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    checksum = xxhash.xxh3_128_hexdigest(canonical.encode())
    return json.dumps({"checksum": checksum, "manifest": content, **document}).encode()


@settings(max_examples=examples(100), deadline=None)
@given(manifests())
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    parsed = parse_manifest(manifest.to_bytes(), "here")
    assert parsed == manifest
    assert parsed.checksum == manifest.checksum != ""
    assert parsed.to_bytes() == manifest.to_bytes()
    assert parsed.link == Link(manifest.id, manifest.checksum)


def test_only_a_run_with_losses_has_the_field() -> None:
    assert b"losses" not in EXAMPLE.to_bytes()
    loss = {"rank": 1, "since": 2, "step": 5, "ranks": 4, "total_steps": 10}
    assert parse_manifest(rewritten({"losses": [loss]}), "here").losses == (Loss(1, 2, 5, 4, 10),)


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"total_steps": 0}, {"rank": -1}, {"steps": 1}])
def test_a_loss_is_checked(wrong: dict[str, int]) -> None:
    loss = {"rank": 1, "since": 2, "step": 5, "ranks": 4, "total_steps": 10}
    for losses in ([{**loss, **wrong}], [loss] * 257, []):
        with pytest.raises(CorruptCheckpoint, match="losses"):
            parse_manifest(rewritten({"losses": losses}), "here")


def test_digests_are_stored_only_if_there_are_any() -> None:
    """Older readers refuse a checkpoint of differences, and read all others."""
    assert b"deltas" not in EXAMPLE.to_bytes()
    (table,) = list(EXAMPLE.tables)[:1]
    digests = {table: {"before": "0" * 16, "after": "f" * 16}}
    parsed = parse_manifest(rewritten({"deltas": digests, "format_version": 2}), "here")
    assert parsed.deltas == {table: TableDigests("0" * 16, "f" * 16)}
    assert parse_manifest(parsed.to_bytes(), "here") == parsed


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 1},
        {"deltas": {}},
        {"deltas": {"no such table": {"before": "0" * 16, "after": "f" * 16}}},
        {"before": None},
        {"before": 0},
        {"after": "f" * 15},
        {"after": None},
        {"between": "0" * 16},
    ],
)
def test_digests_are_checked(change: dict[str, Any]) -> None:
    (table,) = list(EXAMPLE.tables)[:1]
    known = {"deltas", "format_version"}
    of_table = {k: v for k, v in change.items() if k not in known}
    whole = {k: v for k, v in change.items() if k in known}
    deltas = {table: {"before": "0" * 16, "after": "f" * 16, **of_table}}
    with pytest.raises(CorruptCheckpoint, match="here"):
        parse_manifest(rewritten({"deltas": deltas, "format_version": 2, **whole}), "here")


def test_what_has_version_2() -> None:
    """Tables stored as differences, and children that may hold differences beside rows."""
    child = {"format_version": 2, "parent": {"id": "x", "checksum": "0" * 32}}
    full: dict[str, Any] = {"kind": "full", "parent": None, "earlier_fractions": []}
    found = parse_manifest(rewritten({**child, "kind": "differential"}), "here")
    assert (found.format_version, found.deltas) == (2, {})
    with pytest.raises(CorruptCheckpoint, match="full without deltas, in version 2"):
        parse_manifest(rewritten({**full, "format_version": 2}), "here")
    assert parse_manifest(rewritten(full), "here").format_version == 1


def test_the_format_can_be_read_without_this_package() -> None:
    document = json.loads(EXAMPLE.to_bytes())
    canonical = json.dumps(
        document["manifest"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert document["checksum"] == xxhash.xxh3_128_hexdigest(canonical.encode())
    assert document["manifest"]["format_version"] == 1 < FORMAT_VERSION
    assert parse_manifest(rewritten({}), "here") == EXAMPLE


def test_content_decides_the_checksum() -> None:
    assert replace(EXAMPLE, step=21).sealed().checksum != EXAMPLE.checksum
    assert replace(EXAMPLE, checksum="").sealed().checksum == EXAMPLE.checksum


@pytest.mark.parametrize("change", [{"step": -1}, {"kind": "full"}, {"id": "../elsewhere"}])
def test_what_readers_would_refuse_is_not_written(change: dict[str, Any]) -> None:
    made = replace(EXAMPLE, **change)
    with pytest.raises(CorruptCheckpoint):
        parse_manifest(rewritten(change), "here")
    with pytest.raises(ValueError, match=r"."):
        made.to_bytes()


def test_every_flipped_bit_is_detected() -> None:
    data = EXAMPLE.to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                parsed = parse_manifest(bytes(damaged), "here")
            except (CorruptCheckpoint, UnsupportedFormat):
                continue
            # 1.5E-05 is the same number as 1.5e-05.
            assert parsed == EXAMPLE
            assert (data[place], damaged[place]) == (ord("e"), ord("E"))


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0), st.integers(0, 40), st.binary(max_size=40))
def test_other_damage_is_detected(place: int, length: int, content: bytes) -> None:
    """Return an equal manifest in spite of a change (an added space, say), or refuse the text."""
    data = EXAMPLE.to_bytes()
    place %= len(data)
    damaged = data[:place] + content + data[place + length :]
    try:
        parsed = parse_manifest(damaged, "here")
    except (CorruptCheckpoint, UnsupportedFormat):
        return
    assert parsed == EXAMPLE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"null",
        b"5",
        b'"manifest"',
        b"[]",
        b"{}",
        b'{"manifest": 5}',
        b'{"manifest": []}',
        b'{"manifest": {}}',
        b'{"manifest": {"format_version": 1}}',
        b'{"manifest": {"format_version": 1, "a": "\\ud800"}}',
        b"[" * 100_000,
        b'{"manifest": {"format_version": 1, "a": ' + b"1" * 10_000 + b"}}",
        EXAMPLE.to_bytes()[:-1],
        EXAMPLE.to_bytes() + b"}",
    ],
    ids=lambda data: repr(data[:45]),
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="here"):
        parse_manifest(data, "here")


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, -1, "1", 1.0, True, None])
def test_other_versions_are_refused(version: object) -> None:
    """Refuse any fields of a newer version, which this release can't check."""
    with pytest.raises(UnsupportedFormat, match=r"here .* reads 1 to 2: upgrade"):
        parse_manifest(rewritten({"format_version": version, "kind": "sparse"}), "here")
    newer = {"manifest": {"format_version": 3, "entirely": "different"}, "checksum": "sha"}
    with pytest.raises(UnsupportedFormat, match="version 3"):
        parse_manifest(json.dumps(newer).encode(), "here")


BAD_NAMES = ["", ".", "..", "/", "/etc/passwd", "../x", "a/b", "a\\b", "x\x00", "a\n", "x" * 256]


@pytest.mark.parametrize("name", [*BAD_NAMES, "zip::x", 5, None, ["x"]])
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_plain_name(name)
    file = to_builtins(EXAMPLE.files[0])
    for change in (
        {"id": name},
        {"files": [{**file, "name": name}]},
        {"parent": {"id": name, "checksum": "0"}},
    ):
        with pytest.raises(CorruptCheckpoint, match="here"):
            parse_manifest(rewritten(change), "here")


@pytest.mark.parametrize("name", ["a", "step 10", "v1.2_final-3", "größe", ".x", "...", "x" * 255])
def test_names_of_users(name: str) -> None:
    assert is_plain_name(name)
    assert parse_manifest(rewritten({"id": name}), "here").id == name


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "full"},
        {"parent": None},
        {"kind": "partial"},
        {"kind": None},
        {"kind": ["full"]},
        {"kind": "missing"},
        {"parent": "seq-1"},
        {"parent": {"id": "x"}},
        {"previous": {"id": "x", "checksum": "0", "more": 1}},
        {"sequence": -1},
        {"sequence": "1"},
        {"step": True},
        {"step": 1.0},
        {"world_size": None},
        {"dense_bytes": "missing"},
        {"lossy_restores": -2},
        {"tables": []},
        {"tables": {"t": {"rows": 1}}},
        {"tables": {"t": 5}},
        {"files": {"rank-00000.bin": 5}},
        {"files": 5},
        {"files": [{"name": "x"}]},
        {"unknown": 1},
    ],
    ids=repr,
)
def test_fields_that_make_no_sense(change: dict[str, Any]) -> None:
    """Refuse fields of another format even with a valid checksum."""
    with pytest.raises(CorruptCheckpoint, match="here"):
        parse_manifest(rewritten(change), "here")


FIELDS = st.sampled_from([name for name in to_builtins(EXAMPLE) if name != "checksum"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=examples(200), deadline=None)
@given(FIELDS, VALUES)
def test_no_field_can_crash_a_reader(name: str, value: object) -> None:
    try:
        parse_manifest(rewritten({name: value}), "here")
    except (CorruptCheckpoint, UnsupportedFormat):
        return


def test_derived_figures_are_sums() -> None:
    one = TableTotals(rows=10, dim=4, stored_values=8, fp32_bytes=200)
    other = TableTotals(rows=30, dim=2, stored_values=12, fp32_bytes=300, error_rows=1)
    files = (replace(EXAMPLE.files[0], size=70), replace(EXAMPLE.files[0], name="b", size=5))
    manifest = replace(EXAMPLE, tables={"a": one, "b": other}, files=files, dense_bytes=9)
    assert manifest.modified_fraction == 20 / 100
    assert manifest.full_fp32_bytes == 509
    assert manifest.stored_bytes == 75
    assert manifest.lossy
    assert not replace(manifest, tables={"a": one}).lossy
    assert replace(manifest, tables={}).modified_fraction == 0


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 2**32 - 1))
def test_ids_carry_their_sequence(sequence: int, step: int, attempt: int) -> None:
    name = checkpoint_id(sequence, step, f"{attempt:08x}")
    assert sequence_of(name) == sequence
    assert is_plain_name(name)


def test_no_id_is_made_that_is_not_known_again() -> None:
    """Recognize every id that can be made: other attempts would never be cleaned up."""
    assert sequence_of(new_id(LAST_SEQUENCE, 1)) == LAST_SEQUENCE
    assert sequence_of(checkpoint_id(LAST_SEQUENCE + 1, 1, "0" * 8)) is None
    for compacted in (False, True):
        with pytest.raises(CorruptCheckpoint, match=r"number 9223372036854775808: .*move it"):
            new_id(2**63, 1, compacted=compacted)
    with pytest.raises(CorruptCheckpoint, match=r"number 10{18}:"):
        new_id(LAST_SEQUENCE + 1, 1)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-00000010",
        "seq-1_step-00000010_0123abcd",
        "seq-000001_step-00000010_0123abcd.tmp",
        ".seq-000001_step-00000010_0123abcd",
        "seq-000001_step-00000010_0123ABCD",
        "seq--00001_step-00000010_0123abcd",
        "seq-00000\u0661_step-00000010_0123abcd",  # a digit in Unicode
    ],
)
def test_other_names_carry_none(name: str) -> None:
    assert sequence_of(name) is None
