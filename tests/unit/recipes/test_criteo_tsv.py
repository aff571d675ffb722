"""Raw Criteo files: exact values, damaged files, and files written by other systems."""

from __future__ import annotations

import gzip
import logging
import os
from collections.abc import Sequence
from itertools import islice
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.dlrm_criteo import criteo_tsv
from recipes.dlrm_criteo.criteo_tsv import MAX_LINE, CriteoFormatError, CriteoTsv, parse_lines
from recipes.dlrm_criteo.samples import Samples
from tests.examples import examples
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

ROOT = Path(__file__).parents[3]


def write(path: Path, lines: Sequence[bytes], end: bytes = b"\n") -> str:
    path.write_bytes(b"".join(line + end for line in lines))
    return str(path)


def everything(dataset: CriteoTsv) -> Samples:
    return join(list(dataset.read(0, 1, 0, 1)))


def read_all(path: str | Sequence[str], **options: Any) -> Samples:
    return everything(CriteoTsv(SIZES, path, **{"holdout_every": 0, **options}))


def good_line() -> list[str]:
    return ["1", *["7"] * 13, *["0a1b2c3d"] * 26]


# --- values ---------------------------------------------------------------------------------------


def test_values_of_a_handwritten_line(tmp_path: Path) -> None:
    dense = ["0", "1", "", "-1", "-2", "1382", "00012", "1015215", "-0", "4", "15", "", "2"]
    ids = ["00000000", "00000001", "", "ffffffff", "FFFFFFFF", "a", "0badc0de", *["80000000"] * 19]
    path = write(tmp_path / "train.txt", ["\t".join(["1", *dense, *ids]).encode()])
    sizes = [1000] * 25 + [7]
    samples = everything(CriteoTsv(sizes, path, holdout_every=0))
    counts = [0, 1, 0, 0, 0, 1382, 12, 1015215, 0, 4, 15, 0, 2]
    np.testing.assert_allclose(samples.dense, [[log(c + 1) for c in counts]], rtol=1e-6)
    assert samples.sparse.tolist() == [
        [0, 1, 0, 295, 295, 10, 0x0BADC0DE % 1000, *[648] * 18, 2147483648 % 7]
    ]
    assert samples.labels.tolist() == [1.0]
    assert [a.dtype for a in samples] == [np.float32, np.int64, np.float32]


def test_all_columns_empty_but_the_label(tmp_path: Path) -> None:
    samples = read_all(write(tmp_path / "a", [b"0" + b"\t" * 39, b"1" + b"\t" * 39]))
    assert not samples.dense.any()
    assert not samples.sparse.any()
    assert samples.labels.tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1, 300, 5000, 1 << 20])
def test_random_lines_in_blocks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, block: int
) -> None:
    monkeypatch.setattr(criteo_tsv, "BLOCK", block)
    rows = random_rows(100, seed)
    path = write(tmp_path / "day_0", [row.line() for row in rows])
    assert_equal(read_all(path), expected(rows))
    assert_equal(read_all(path, on_bad_line="skip"), expected(rows))


# --- files as others write them -------------------------------------------------------------------


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize("on_bad_line", ["raise", "skip"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("end", ["whole", "no newline", "a blank line", "three blank lines"])
def test_line_ends_and_compression(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    on_bad_line: Literal["raise", "skip"],
    compressed: bool,
    newline: bytes,
    end: str,
) -> None:
    monkeypatch.setattr(criteo_tsv, "BLOCK", block)
    rows = random_rows(23)
    rows[-1].ids[-1] = None  # a line may end in a tab
    text = newline.join(row.line() for row in rows)
    text += newline * ["no newline", "whole", "a blank line", "", "three blank lines"].index(end)
    path = tmp_path / "train.txt"  # gzip is recognised by content, not by name
    path.write_bytes(gzip.compress(text) if compressed else text)
    dataset = CriteoTsv(SIZES, str(path), on_bad_line=on_bad_line, holdout_every=0)
    assert_equal(everything(dataset), expected(rows))
    assert dataset.bad_lines == 0


def test_files_in_natural_order_and_lists_in_theirs(tmp_path: Path) -> None:
    rows = random_rows(30)
    for day, part in ((1, rows[:5]), (2, rows[5:12]), (10, rows[12:])):
        write(tmp_path / f"day_{day}", [row.line() for row in part])
    assert_equal(read_all(str(tmp_path / "day_*")), expected(rows))
    swapped = [str(tmp_path / f"day_{day}") for day in (10, 1)]
    assert_equal(read_all(swapped), expected(rows[12:] + rows[:5]))
    mixed = [str(tmp_path / "day_1"), str(tmp_path / "day_[2]")]
    assert_equal(read_all(mixed), expected(rows[:12]))


def test_names_with_pattern_characters_are_names_first(tmp_path: Path) -> None:
    rows = random_rows(3)
    path = write(tmp_path / "day[1].txt", [row.line() for row in rows])
    assert_equal(read_all(path), expected(rows))


def test_missing_files_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"dataset\.path: there is no file .*nothing_\*"):
        CriteoTsv(SIZES, str(tmp_path / "nothing_*"))
    path = write(tmp_path / "a", [b""])
    with pytest.raises(FileNotFoundError, match=r"dataset\.eval_path: there is no file .*/b'"):
        CriteoTsv(SIZES, path, eval_path=str(tmp_path / "b"))
    with pytest.raises(IsADirectoryError, match="is a directory; name its files"):
        CriteoTsv(SIZES, str(tmp_path))
    with pytest.raises(ValueError, match=r"dataset\.path is empty"):
        CriteoTsv(SIZES, [])


def test_a_day_and_its_archive_are_not_both_trained(tmp_path: Path) -> None:
    for name in ("day_0", "day_0.gz", "day_1"):
        write(tmp_path / name, [])
    with pytest.raises(ValueError, match=r"matches both .*day_0 and .*day_0\.gz"):
        CriteoTsv(SIZES, str(tmp_path / "day_*"))


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_samples_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty").write_bytes(content)
    with pytest.raises(ValueError, match=r"empty\) has 0 training samples"):
        read_all(str(tmp_path / "empty"))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("on_bad_line", ["raise", "skip"])
def test_a_damaged_archive_is_an_error(tmp_path: Path, damage: str, on_bad_line: str) -> None:
    packed = bytearray(gzip.compress(b"\n".join(row.line() for row in random_rows(50))))
    if damage == "cut":
        del packed[-100:]
    else:
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "day_0.gz"
    path.write_bytes(packed)
    with pytest.raises(CriteoFormatError, match=r"day_0\.gz: the gzip file is damaged"):
        read_all(str(path), on_bad_line=on_bad_line)


# --- malformed lines ------------------------------------------------------------------------------


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
    assert_equal(join(list(islice(stream, 10))), expected(rows[:10]))  # what is before it is fine
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


# --- skipping -------------------------------------------------------------------------------------


@pytest.fixture
def spoilt(tmp_path: Path) -> tuple[list[str], list[Row], int]:
    """Two files where bad lines lie at the ends, in a row, and among the good ones."""
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


# --- evaluation, epochs, seeking ------------------------------------------------------------------


def test_eval_path_is_evaluated_and_all_of_path_trained(tmp_path: Path) -> None:
    rows = random_rows(40)
    path = write(tmp_path / "day_0", [row.line() for row in rows[:25]])
    eval_path = write(tmp_path / "day_1", [row.line() for row in rows[25:]])
    dataset = CriteoTsv(SIZES, path, eval_path=eval_path, holdout_every=5)
    assert_equal(everything(dataset), expected(rows[:25]))
    assert_equal(join(list(dataset.read_eval(100, 4, 0, 1))), expected(rows[25:]))


def test_held_out_lines_are_never_trained_nor_parsed_for_training(tmp_path: Path) -> None:
    rows = random_rows(30)
    lines = [row.line() for row in rows]
    lines[9] = b"garbage"
    path = write(tmp_path / "a", lines)
    dataset = CriteoTsv(SIZES, path)  # every tenth
    trained = [row for i, row in enumerate(rows) if i % 10 != 9]
    assert_equal(everything(dataset), expected(trained))
    with pytest.raises(CriteoFormatError, match="a, line 10: it has 1 "):
        list(dataset.read_eval(100, 4, 0, 1))


def test_seeking_parses_nothing_before_the_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(500)
    path = write(tmp_path / "a", [row.line() for row in rows])
    monkeypatch.setattr(criteo_tsv, "BLOCK", 2000)
    parsed: list[int] = []

    def counting(text: bytes) -> criteo_tsv.Parsed:
        parsed.append(text.count(b"\n"))
        return parse_lines(text)

    monkeypatch.setattr(criteo_tsv, "parse_lines", counting)
    dataset = CriteoTsv(SIZES, path, holdout_every=0)
    got = next(dataset.read(400, 40, 1, 4))
    assert_equal(got, expected(rows[410:420]))
    assert sum(parsed) == 10


def test_files_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", [row.line() for row in random_rows(300)])
    monkeypatch.setattr(criteo_tsv, "BLOCK", 1000)
    read: list[int] = []

    def counting(path: str) -> Any:
        for data in genuine(path):
            read.append(len(data))
            yield data

    genuine = criteo_tsv._read
    monkeypatch.setattr(criteo_tsv, "_read", counting)
    next(CriteoTsv(SIZES, path).read(0, 10, 0, 1))
    assert 0 < sum(read) < os.path.getsize(path) / 5
    assert max(read) <= 1000


# --- configuration and real data ------------------------------------------------------------------


def compose_dataset(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "configs" / "dataset"), version_base="1.3"):
        return compose("criteo_tsv", overrides=list(overrides))


def test_hydra_makes_it_from_its_config(tmp_path: Path) -> None:
    rows = random_rows(8)
    for day, part in enumerate((rows[:3], rows[3:])):
        write(tmp_path / f"day_{day}", [row.line() for row in part])
    days = ",".join(str(tmp_path / f"day_{day}") for day in range(2))
    for path in (f"'{tmp_path}/day_*'", f"[{days}]"):
        cfg = compose_dataset(f"path={path}", "on_bad_line=skip", "holdout_every=0")
        dataset = instantiate(cfg, num_embeddings_per_feature=SIZES)
        assert isinstance(dataset, CriteoTsv)
        assert_equal(everything(dataset), expected(rows))
    with pytest.raises(Exception, match="Missing mandatory value: path"):
        instantiate(compose_dataset(), num_embeddings_per_feature=SIZES)


def test_real_criteo_rows() -> None:
    name = os.environ.get("CRITEO_TSV", str(ROOT.parent / "shared/data/criteo_kaggle_head.tsv"))
    if not os.path.isfile(name):
        pytest.skip(f"no real Criteo rows at {name}; set CRITEO_TSV to a plain train.txt or a part")
    count = 1999
    with open(name, encoding="utf-8") as lines:
        fields = [line.rstrip("\n").split("\t") for line in islice(lines, count)]
    rows = [
        Row(
            int(field[0]),
            [int(v) if v else None for v in field[1:14]],
            [int(v, 16) if v else None for v in field[14:]],
        )
        for field in fields
    ]
    dataset = CriteoTsv(SIZES, name, holdout_every=0)
    got = next(dataset.read(0, len(rows), 0, 1))
    assert_equal(got, expected(rows))
    assert 0.1 < got.labels.mean() < 0.5
    assert any(v is not None and v < 0 for row in rows for v in row.dense)
    if "CRITEO_TSV" not in os.environ:
        assert len(everything(dataset).labels) == count
