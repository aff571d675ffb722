"""Keep the package's rooms and files small enough to be read."""

from __future__ import annotations

from recipes.benchmarks.structure import SLAB, files

MOST_FILES = 14
MOST_LINES = 400


def test_rooms_and_files_stay_small() -> None:
    rooms = files()
    assert len(rooms) > 20
    too_full = {name: room for name, room in rooms.items() if room["files"] > MOST_FILES}
    assert set(too_full) <= {SLAB}, "move modules that form one concept to a room of their own"
    too_long = {
        name: room["longest"] for name, room in rooms.items() if room["longest"] > MOST_LINES
    }
    assert not too_long, "split the file by its concepts"
