"""Check the reading of MovieLens-100k's files, and the ratings made in their shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.figures.movielens import FEATURES, ratings, read, synthetic

GROUPLENS = {
    "u.data": "1\t10\t5\t874965758\n2\t10\t3\t874965759\n1\t20\t1\t875965758\n",
    "u.user": "1|24|M|technician|85711\n2|53|F|other|94043\n",
    "u.item": (
        "10|Toy Story (1995)|01-Jan-1995||http://x|0|0|0|1|1|1" + "|0" * 13 + "\n"
        "20|Wo\xebl (1996)|22-Feb-1996||http://y|0|1" + "|0" * 17 + "\n"
    ),
}
RECBOLE = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    + GROUPLENS["u.data"],
    "ml-100k.user": "user_id:token\tage:token\tgender\toccupation\tzip\n"
    + GROUPLENS["u.user"].replace("|", "\t"),
    "ml-100k.item": "item_id:token\ttitle\tyear\tclass\n"
    "10\tToy Story\t1995\tAnimation Comedy\n20\tWo\xebl\t1996\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin1")
    return folder


@pytest.mark.parametrize("files", [GROUPLENS, RECBOLE])
def test_both_layouts_are_read(tmp_path: Path, files: dict[str, str]) -> None:
    found = read(write(tmp_path, files))
    assert found.stars.tolist() == [5, 3, 1]
    assert found.ids.shape == (3, len(FEATURES))
    columns = dict(zip(FEATURES, found.ids.T.tolist(), strict=True))
    sizes = dict(zip(FEATURES, found.sizes, strict=True))
    assert columns["user"] == [0, 1, 0]
    assert columns["item"] == [0, 0, 1]
    assert columns["year"] == [0, 0, 1]
    assert columns["age"] == [0, 1, 0]
    assert sizes["genres"] == 2
    assert sizes["user_genre"] == 3
    assert sizes["week"] == 2


@pytest.mark.parametrize("name", ["u.user", "u.item"])
@pytest.mark.parametrize("text", [None, "1|24\n", "7|24|M|other|1\n"])
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, name: str, text: str | None
) -> None:
    files = {key: value for key, value in GROUPLENS.items() if key != name}
    if text is not None:
        files[name] = text
    with pytest.raises(ValueError, match=r"fetch them again|can't be read"):
        read(write(tmp_path, files))


def test_stars_out_of_range_are_refused(tmp_path: Path) -> None:
    files = {**GROUPLENS, "u.data": "1\t10\t6\t874965758\n"}
    with pytest.raises(ValueError, match="no ratings of 1 to 5"):
        read(write(tmp_path, files))


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither u\.data nor"):
        ratings(tmp_path)


def test_synthetic_ratings_have_the_shape() -> None:
    made = ratings(None)
    assert made.ids.shape == (100_000, len(FEATURES))
    assert made.sizes[:2] == (943, 1682)
    assert synthetic(users=40, count=30).sizes[:2] == (30, 30)
    assert set(made.stars.tolist()) == {1, 2, 3, 4, 5}
    assert 3.2 < made.stars.mean() < 3.8
    assert (made.ids.max(axis=0) + 1).tolist() == list(made.sizes)
    again = synthetic()
    assert np.array_equal(made.ids, again.ids)
    assert np.array_equal(made.stars, again.stars)
