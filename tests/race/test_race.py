"""The compiled core of copy on write has no data race: fewer races than `make race`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("copy_on_write.cpp")
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
RACES = 50_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("race")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    (folder / "empty.cpp").write_text("int main() {}\n")
    tried = subprocess.run(
        [compiler, *FLAGS, folder / "empty.cpp", "-o", folder / "empty"],
        capture_output=True,
        text=True,
        check=False,
    )
    works = tried.returncode == 0 and subprocess.run([folder / "empty"], check=False)
    if not works or works.returncode:
        pytest.skip(f"g++ has no thread sanitizer that works here: {tried.stderr[-300:]}")
    subprocess.run([compiler, *FLAGS, SOURCE, "-o", folder / "race"], check=True)
    return folder / "race"


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_those_of_their_cut(compiled: Path, seed: int) -> None:
    ran = subprocess.run(
        [compiled, str(RACES), str(seed)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[:5000]
    assert "WARNING: ThreadSanitizer" not in ran.stderr
    raced = re.match(r"(\d+) rows copied before an update, over \d+ cuts: all of their", ran.stdout)
    assert raced
    assert int(raced[1]) >= RACES
