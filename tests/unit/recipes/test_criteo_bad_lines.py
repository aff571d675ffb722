"""Name malformed lines of Criteo files, or leave them out on every rank alike."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.dlrm_criteo import criteo_tsv
from recipes.dlrm_criteo.criteo_tsv import MAX_LINE, CriteoFormatError, CriteoTsv, parse_lines
from tests.examples import examples
from tests.unit.recipes.criteo_files import everything, read_all, write
from tests.unit.streams import (
    SIZES,
    Row,
    assert_equal,
    expected,
    global_batches,
    join,
    random_rows,
    take,
)


def good_line() -> list[str]:
    return ["1", *["7"] * 13, *["0a1b2c3d"] * 26]


def changed(column: int, value: str) -> bytes:
    line = good_line()
    line[column] = value
    return "\t".join(line).encode()


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "blank": (b"", "it is blank"),
    "too few columns": (b"1\t2\t3", "it has 3 tab-separated columns; expected 40"),
    "too many columns": (changed(39, "a\tb"), "it has 41 tab-separated columns; expected 40"),
    "no label column": ("\t".join(good_line()[1:]).encode(), r"it has 39 .*\(Kaggle's test\.txt"),
    "commas": (",".join(good_line()).encode(), "it has 1 tab-separated columns"),
    "label 2": (changed(0, "2"), "the label is '2'; expected 0 or 1"),
    "label -1": (changed(0, "-1"), "the label is '-1'; expected 0 or 1"),
    "no label": (changed(0, ""), "the label is ''; expected 0 or 1"),
    "label 1.0": (changed(0, "1.0"), "the label is '1.0'"),
    "a fraction": (changed(1, "1.5"), "integer column I1 is '1.5'; expected nothing or an integer"),
    "two signs": (changed(13, "--5"), "integer column I13 is '--5'"),
    "only a sign": (changed(3, "-"), "integer column I3 is '-'"),
    "a plus": (changed(3, "+5"), r"integer column I3 is '\+5'"),
    "a blank in it": (changed(3, " 5"), "integer column I3 is ' 5'"),
    "hex for an integer": (changed(5, "ff"), "integer column I5 is 'ff'"),
    "huge integer": (changed(5, "9" * 19), "integer column I5 is '9999999999999999999'"),
    "not hexadecimal": (changed(14, "0badc0dg"), "category column C1 is '0badc0dg'; expected"),
    "prefix": (changed(39, "0x0badc0"), "category column C26 is '0x0badc0'"),
    "negative id": (changed(20, "-8fd1e64"), "category column C7 is '-8fd1e64'"),
    "huge id": (changed(20, "1" * 17), "category column C7 is '11111111111111111'"),
    "not UTF-8": (b"\xff\xfe" + changed(0, "1"), r"the label is '\\xff\\xfe1'"),
    "byte order mark": (b"\xef\xbb\xbf" + changed(0, "1"), r"the label is '\\xef\\xbb\\xbf1'"),
    "other digits": (changed(2, "\u0665"), r"integer column I2 is '\\xd9\\xa5'"),
    "zero byte": (changed(2, "\0"), r"integer column I2 is '\\x00'"),
    "carriage return": (changed(2, "1\r2"), r"integer column I2 is '1\\r2'"),
    "too long": (changed(2, "1" * MAX_LINE), "it is longer than 4,096 bytes"),
    "far too long": (changed(2, "1" * 300_000), "it is longer than 4,096 bytes"),
    "long without columns": (b"x" * 300_000, "it is longer than 4,096 bytes"),
    "UTF-16": ("\t".join(good_line()).encode("utf-16-le"), r"the label is '1\\x00'"),
}


@pytest.mark.parametrize("block", [1000, 1 << 20])
@pytest.mark.parametrize(("bad", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_malformed_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, bad: bytes, message: str
) -> None:
    monkeypatch.setattr(criteo_tsv, "BLOCK", block)
    rows = random_rows(12)
    lines = [row.line() for row in rows]
    first = write(tmp_path / "day_0", lines[:4])
    second = write(tmp_path / "day_1", [*lines[4:10], bad, *lines[10:]])
    pattern = rf"{second}, line 7: {message}.*; correct the file, .*dataset\.on_bad_line=skip"
    dataset = CriteoTsv(SIZES, [first, second], holdout_every=0)
    stream = dataset.read(0, 1, 0, 1)
    assert_equal(join(list(islice(stream, 10))), expected(rows[:10]))  # earlier lines are fine
    with pytest.raises(CriteoFormatError, match=pattern):
        next(stream)
    with pytest.raises(CriteoFormatError, match=pattern):
        next(dataset.read(6, 6, 0, 1))
    # Far lines are not parsed by this rank; another rank gets the error.
    assert_equal(join(list(dataset.read(6, 6, 0, 2))), expected(rows[6:9]))
    with pytest.raises(CriteoFormatError, match=pattern):
        list(dataset.read(6, 6, 1, 2))

    skipping = CriteoTsv(SIZES, [first, second], holdout_every=0, on_bad_line="skip")
    assert_equal(everything(skipping), expected(rows))
    assert skipping.bad_lines == 1


@pytest.mark.parametrize("bad", [b"", b"x" * 10_000], ids=["blank", "too long"])
def test_a_malformed_last_or_only_line(tmp_path: Path, bad: bytes) -> None:
    line = random_rows(1)[0].line()
    path = tmp_path / "a"
    path.write_bytes(bad + b"\n" + line)
    with pytest.raises(CriteoFormatError, match="a, line 1: it is "):
        read_all(str(path))
    path.write_bytes(line + b"\n" + b"x" * 10_000)
    with pytest.raises(CriteoFormatError, match="a, line 2: it is longer"):
        read_all(str(path))
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(ValueError, match="1 malformed lines left out"):
        read_all(str(path), on_bad_line="skip")


def test_a_flood_of_blank_lines_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_tsv, "BLOCK", 1000)
    line = random_rows(1)[0].line()
    path = tmp_path / "a"
    path.write_bytes(line + b"\n" * 50_000 + line)
    sizes = [len(block.text) for block in criteo_tsv.blocks(str(path))]
    assert sum(sizes) == 2 * len(line) + 50_001  # nothing lost
    assert max(sizes) < 5000
    dataset = CriteoTsv(SIZES, str(path), on_bad_line="skip", holdout_every=0)
    assert len(everything(dataset).labels) == 2
    assert dataset.bad_lines == 49_999


@settings(max_examples=examples(300), deadline=None)
@given(
    fields=st.lists(st.text("019afF-+.\rxé\0", max_size=20), min_size=40, max_size=40),
    few=st.sets(st.integers(0, 39), max_size=2),
)
def test_validation_agrees_with_a_plain_one(fields: list[str], few: set[int]) -> None:
    line = [
        field if i in few else value
        for i, (field, value) in enumerate(zip(fields, good_line(), strict=True))
    ]

    def plain(column: int, field: str) -> bool:
        if column == 0:
            return field in ("0", "1")
        digits = field.removeprefix("-") if column <= 13 else field
        allowed, most = ("0123456789", 18) if column <= 13 else ("0123456789abcdefABCDEF", 16)
        return field == "" or (0 < len(digits) <= most and set(digits) <= set(allowed))

    fine = all(plain(i, field) for i, field in enumerate(line))
    ordinary = "\t".join(good_line())
    parsed = parse_lines(f"{ordinary}\n{chr(9).join(line)}\n{ordinary}\n".encode())
    assert set(parsed.faults) == (set() if fine else {1})
    if fine:
        assert parsed.labels[1] == float(line[0])
        assert parsed.dense[1].tolist() == [int(v or "0") for v in line[1:14]]
        assert parsed.sparse[1].tolist() == [int(v or "0", 16) for v in line[14:]]
    for row in (0, 2):
        assert parsed.dense[row].tolist() == [7] * 13
        assert parsed.sparse[row].tolist() == [0x0A1B2C3D] * 26


@pytest.fixture
def spoilt(tmp_path: Path) -> tuple[list[str], list[Row], int]:
    """Write two files with bad lines at their ends, in runs, and among the good lines."""
    rows = random_rows(61)
    bad = [line for line, _ in BAD_LINES.values()]
    lines = [row.line() for row in rows]
    first = [bad[1], bad[2], *lines[:9], bad[3], *lines[9:30], *bad[4:20]]
    second = [*lines[30:44], *bad[20:], *lines[44:], bad[5]]
    paths = [write(tmp_path / "day_0", first), write(tmp_path / "day_1", second)]
    return paths, rows, 3 + 16 + len(bad[20:]) + 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("position", [0, 7, 36])
def test_skipping_numbers_good_samples_alike_on_all_ranks(
    spoilt: tuple[list[str], list[Row], int], world_size: int, position: int
) -> None:
    paths, rows, bad = spoilt
    dataset = CriteoTsv(SIZES, paths, on_bad_line="skip", holdout_every=5)
    training = take(expected(rows), [i for i in range(61) if i % 5 != 4])
    batch = 3 * world_size
    got = global_batches(dataset, position, batch, world_size)
    assert len(got) == (49 - position) // batch
    assert_equal(join(got), take(training, range(position, position + len(got) * batch)))
    assert dataset.bad_lines == bad


def test_bad_lines_are_counted_once_and_logged_once(
    spoilt: tuple[list[str], list[Row], int], caplog: pytest.LogCaptureFixture
) -> None:
    paths, _, bad = spoilt
    dataset = CriteoTsv(SIZES, paths, on_bad_line="skip", holdout_every=5, epochs=3)
    with caplog.at_level(logging.WARNING):
        assert sum(len(s.labels) for s in dataset.read(0, 7, 0, 1)) == 3 * 49 // 7 * 7
        assert sum(len(s.labels) for s in dataset.read_eval(100, 5, 0, 1)) == 12
    assert dataset.bad_lines == bad
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert messages[0].startswith(f"{paths[0]}, line 1 is left out: it has 3 ")
    assert messages[1] == f"{paths[0]}: 19 malformed lines were left out"
    assert messages[2].startswith(f"{paths[1]}, line 15 is left out: ")
    assert messages[3] == f"{paths[1]}: {bad - 19} malformed lines were left out"


def test_on_bad_line_must_be_known(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [])
    with pytest.raises(ValueError, match=r"dataset\.on_bad_line is 'ignore'; expected 'raise' or"):
        read_all(path, on_bad_line="ignore")
