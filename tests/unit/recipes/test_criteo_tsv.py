"""Read the exact values of raw Criteo files, also of damaged ones and of other systems' files."""

from __future__ import annotations

import gzip
import os
from itertools import islice
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from recipes.dlrm_criteo import criteo_tsv
from recipes.dlrm_criteo.criteo_tsv import CriteoFormatError, CriteoTsv, parse_lines
from tests.unit.recipes.criteo_files import everything, read_all, write
from tests.unit.streams import SIZES, Row, assert_equal, expected, join, random_rows

ROOT = Path(__file__).parents[3]


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


# --- files from other systems ---------------------------------------------------------------------


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
    path = tmp_path / "train.txt"  # gzip is recognised by the content, not by the name
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
    dataset = CriteoTsv(SIZES, path)  # holds out every tenth
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
