"""Keep the package's rooms and files small enough to be read."""

from __future__ import annotations

from recipes.benchmarks.structure import SLAB, files, way_of_a_row

MOST_FILES = 14
MOST_LINES = 400
MOST_CROSSINGS = {"save": 100, "restore": 250}


def test_rooms_and_files_stay_small() -> None:
    rooms = files()
    assert len(rooms) > 20
    too_full = {name: room for name, room in rooms.items() if room["files"] > MOST_FILES}
    assert set(too_full) <= {SLAB}, "move modules that form one concept to a room of their own"
    too_long = {
        name: room["longest"] for name, room in rooms.items() if room["longest"] > MOST_LINES
    }
    assert not too_long, "split the file by its concepts"


def test_a_row_crosses_few_rooms() -> None:
    crossed = {name: calls.between_rooms for name, calls in way_of_a_row().items()}
    assert crossed.keys() == MOST_CROSSINGS.keys()
    too_many = {name: n for name, n in crossed.items() if not 20 < n < MOST_CROSSINGS[name]}
    assert not too_many, "a caller that asks another room for each part should ask once for all"
