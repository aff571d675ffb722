"""Remove images that are over: of this run on other ranks, and old ones of other runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from torchrec_checknrun.shared_memory.file import PAGE, ImageFile, NoImage, owner_text
from torchrec_checknrun.shared_memory.header import Word, Words

_NAME = re.compile(r"checknrun-(\d+)-([0-9a-f]{16})-(\d+)of(\d+)\.image")


def sweep(own: Path, world_size: int, keep_hours: float) -> Iterator[str]:
    """Remove this user's images that nobody can go on from; yield what was removed, as text.

    Args:
        own: path of this rank's image; its folder is swept.
        world_size: the number of ranks of this run.
        keep_hours: how long images of other runs stay after their last step.
    """
    mine = _NAME.fullmatch(own.name)
    assert mine is not None
    with os.scandir(own.parent) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None or found[1] != mine[1]:
            continue
        this_run = found[2] == mine[2]
        if this_run and int(found[4]) == world_size:
            continue
        why = "this run has other ranks now" if this_run else f"no step for {keep_hours:g} hours"
        if _is_over(own.parent / name, 0.0 if this_run else keep_hours):
            (own.parent / name).unlink(missing_ok=True)
            yield f"removed the image {own.parent / name}: {why}"


def _is_over(path: Path, keep_hours: float) -> bool:
    """Tell whether an image has no living owner, and no step within some hours."""
    try:
        file = ImageFile.open(path)
    except NoImage:
        return False
    try:
        words = Words(file.map(0, PAGE))
        if not words.begin_an_image or owner_text(words[Word.OWNER]) is not None:
            return False
        return words[Word.TIME] <= time.time() - keep_hours * 3600
    except NoImage:
        return False
    finally:
        file.close()
