"""Provide checkpoints that several modules damage, or restore into models that don't fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed.small_job import Made, Workers, three_checkpoints, where


@pytest.fixture(scope="session")
def made(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that copies three checkpoints and their states into a folder."""
    folders: dict[bool, tuple[Path, list[str]]] = {}

    def make(tmp_path: Path, full: bool = False) -> list[str]:
        if full not in folders:
            folder = tmp_path_factory.mktemp("made")
            names = workers(2).run(three_checkpoints, **where(folder), full=full)[0]
            folders[full] = (folder, names)
        shutil.copytree(folders[full][0], tmp_path, dirs_exist_ok=True)
        return list(folders[full][1])

    return make
