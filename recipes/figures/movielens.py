"""Read MovieLens-100k from a folder of the user's, or make ratings of its shape.

GroupLens' terms allow no redistribution, so the user says where the files are: `u.data`, `u.user`
and `u.item` as GroupLens publishes them, or `ml-100k.inter`, `.user` and `.item` as RecBole brings
them. Without a folder ratings come from a planted teacher: as many users, items and ratings, a few
popular items, low-rank tastes, five stars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

USERS, ITEMS, RATINGS = 943, 1682, 100_000
FEATURES = (
    "user",
    "item",
    "age",
    "gender",
    "occupation",
    "zip",
    "year",
    "genres",
    "hour",
    "week",
    "user_genre",
)
_ANY = ("u.data", "ml-100k.inter")
_RANK = 4  # of the synthetic tastes


@dataclass(frozen=True)
class Ratings:
    """Ratings and what is known of each.

    Attributes:
        source: where they come from.
        ids: ``(n, 11)`` int64, a column for each of ``FEATURES``, numbered from 0.
        sizes: ids of each column.
        stars: ``(n,)`` float32, 1 to 5.
    """

    source: str
    ids: np.ndarray
    sizes: tuple[int, ...]
    stars: np.ndarray

    @classmethod
    def of(cls, source: str, columns: Sequence[np.ndarray], stars: np.ndarray) -> Ratings:
        """Number the values of each column."""
        numbered = [np.unique(column, return_inverse=True) for column in columns]
        ids = np.stack([inverse.reshape(-1) for _, inverse in numbered], axis=1).astype(np.int64)
        sizes = tuple(len(values) for values, _ in numbered)
        return cls(source, ids, sizes, stars.astype(np.float32))


def ratings(folder: Path | None, users: int = USERS, count: int = RATINGS) -> Ratings:
    """Read a folder's ratings; make ``count`` ratings of ``users`` users if there is none.

    Raises:
        ValueError: the folder lacks a file, or a line is not understood.
    """
    return synthetic(users=users, count=count) if folder is None else read(folder)


def read(folder: Path) -> Ratings:
    """Read MovieLens-100k.

    Raises:
        ValueError: the folder lacks a file, or a line is not understood.
    """
    if (folder / "u.data").is_file():
        names, separator, header = ("u.data", "u.user", "u.item"), "|", 0
    elif (folder / "ml-100k.inter").is_file():
        names, separator, header = ("ml-100k.inter", "ml-100k.user", "ml-100k.item"), "\t", 1
    else:
        raise ValueError(f"{folder} has neither {' nor '.join(_ANY)}: name the folder of ml-100k")
    given, users, items = (
        _lines(folder / name, "\t" if name == names[0] else separator, header) for name in names
    )
    year_and_genres = _grouplens_item if separator == "|" else _recbole_item
    try:
        by_user = {fields[0]: fields[1:5] for fields in users}
        by_item = {f[0]: year_and_genres(f) for f in items}
        rows = [
            (user, item, *by_user[user], *by_item[item], int(float(time)))
            for user, item, _, time in given
        ]
        stars = np.array([float(fields[2]) for fields in given])
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{folder}: {names} don't belong together or are not ml-100k's ({error!r}): fetch "
            "them again"
        ) from error
    if not len(rows) or not ((stars >= 1) & (stars <= 5)).all():
        raise ValueError(f"{folder / names[0]} has no ratings of 1 to 5 stars")
    user, item, age, gender, occupation, zips, year, genres, time = zip(*rows, strict=True)
    columns = {
        "user": np.array(user),
        "item": np.array(item),
        "age": np.array(age).astype(np.int64) // 5,
        "gender": np.array(gender),
        "occupation": np.array(occupation),
        "zip": np.array([code[:3] for code in zips]),
        "year": np.array(year),
        "genres": np.array(genres),
        **_clock(np.array(time)),
        "user_genre": np.array(
            [f"{a} {b.split(' ')[0]}" for a, b in zip(user, genres, strict=True)]
        ),
    }
    return Ratings.of(str(folder.name), [columns[name] for name in FEATURES], stars)


def _lines(path: Path, separator: str, header: int) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="latin1").splitlines()[header:]
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error}): name the folder of ml-100k") from error
    return [line.split(separator) for line in lines]


def _grouplens_item(fields: list[str]) -> tuple[str, str]:
    """Return year and genres of a line of `u.item`."""
    flags = fields[5:24]
    return fields[2][-4:], " ".join(str(i) for i, flag in enumerate(flags) if flag == "1")


def _recbole_item(fields: list[str]) -> tuple[str, str]:
    """Return year and genres of a line of `ml-100k.item`, which may lack its last fields."""
    return fields[2], "".join(fields[3:4])


def _clock(seconds: np.ndarray) -> Mapping[str, np.ndarray]:
    return {"hour": seconds // 3600 % 24, "week": seconds // (7 * 86400)}


def synthetic(seed: int = 0, users: int = USERS, count: int = RATINGS) -> Ratings:
    """Make ratings of MovieLens-100k's shape from a planted teacher."""
    random = np.random.default_rng(seed)
    activity = random.lognormal(0, 1, users)
    popularity = 1 / (10 + np.arange(ITEMS))
    user = random.choice(users, count, p=activity / activity.sum())
    item = random.permutation(ITEMS)[random.choice(ITEMS, count, p=popularity / popularity.sum())]
    # Everyone has rated something, and everything was rated, if there are ratings enough.
    user[:users] = np.arange(users)[:count]
    item[:ITEMS] = random.permutation(ITEMS)[:count]
    genre = random.integers(0, 216, ITEMS)
    time = random.integers(0, 200 * 86400, users)[user] + random.integers(0, 14 * 86400, count)
    tastes = (random.standard_normal((size, _RANK)) for size in (users, ITEMS))
    taste, kind = (matrix / _RANK**0.25 for matrix in tastes)
    of_user = 0.4 * random.standard_normal(users)[user]
    of_item = 0.5 * random.standard_normal(ITEMS)[item]
    liking = 0.4 * (taste[user] * kind[item]).sum(axis=1)
    wish = 3.5 + of_user + of_item + liking + 0.9 * random.standard_normal(count)
    attributes = {"age": 13, "gender": 2, "occupation": 21, "zip": 400}
    columns = {
        "user": user,
        "item": item,
        **{n: random.integers(0, size, users)[user] for n, size in attributes.items()},
        "year": random.integers(0, 72, ITEMS)[item],
        "genres": genre[item],
        **_clock(time),
        "user_genre": user * 18 + genre[item] % 18,
    }
    stars = np.clip(np.rint(wish), 1, 5)
    return Ratings.of("synthetic ratings", [columns[name] for name in FEATURES], stars)
