"""Copies of other ranks in shared memory outlive processes, and are removed when they are over."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchrec_checknrun.tiers.copies_folder import CopiesFolder

MINE, OTHER = "0123456789abcdef", "fedcba9876543210"
KEEP_HOURS = 24.0
OVER = 2 * KEEP_HOURS * 3600


def made(folder: Path, run: str, rank: int, world: int, age: float = 0.0) -> CopiesFolder:
    """Make the copies of a rank that has last saved some seconds ago."""
    copies = CopiesFolder(folder / f"checknrun-{os.geteuid()}-{run}-{rank}of{world}.image")
    copies.make()
    (copies.path / "held").mkdir()
    os.utime(copies.path, (time.time() - age,) * 2)
    return copies


def test_copies_that_are_over_are_removed(tmp_path: Path) -> None:
    own = made(tmp_path, MINE, 0, 2, OVER)
    beside = made(tmp_path, MINE, 1, 2, OVER)
    of_four = made(tmp_path, MINE, 3, 4)
    old, young = made(tmp_path, OTHER, 0, 1, OVER), made(tmp_path, OTHER, 1, 2)
    lines = list(own.sweep(KEEP_HOURS))
    assert all(copies.is_safe for copies in (own, beside, young))
    assert not any(copies.path.exists() for copies in (of_four, old))
    assert all(str(copies.path) in "".join(lines) for copies in (of_four, old))
    assert len(lines) == 2


def test_ranks_of_one_machine_remove_them_together(tmp_path: Path) -> None:
    """All sweep at once, and what another has just removed is no error."""
    own = [made(tmp_path, MINE, rank, 2) for rank in range(2)]
    for rank in range(4):
        made(tmp_path, OTHER, rank, 4, OVER)
    first, second = (copies.sweep(KEEP_HOURS) for copies in own)
    lines = [next(first), *second, *first]
    assert len(lines) == 4
    assert not list(tmp_path.glob(f"*{OTHER}*"))


def test_copies_stay_as_long_as_an_image_of_their_run(tmp_path: Path) -> None:
    """A run may take days from one checkpoint to the next, and one of its images may be lost."""
    own = made(tmp_path, MINE, 0, 2)
    found = [made(tmp_path, OTHER, rank, 2, OVER) for rank in range(2)]
    image = found[1].path.with_suffix(".image")
    image.touch()
    assert list(own.sweep(KEEP_HOURS)) == []
    assert all(copies.is_safe for copies in found)
    image.rename(image.with_name(image.name.replace("of2", "of4")))  # of another number of ranks
    assert len(list(own.sweep(KEEP_HOURS))) == 2
    assert not any(copies.path.exists() for copies in found)
