"""Build the wheel and the source archive once for all tests of the packaging."""

import os
import shutil
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.unit.packaging.builds import build_wheel, copy_sources, pip, run


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Build the wheel with failing compilers, which takes less time than compiling."""
    source = copy_sources(tmp_path_factory.mktemp("source"))
    env = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    return build_wheel(source, tmp_path_factory.mktemp("wheel"), env)


@pytest.fixture(scope="session")
def wheel(built: tuple[Path, str]) -> Path:
    return built[0]


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack a source archive into an empty folder."""
    source = copy_sources(tmp_path_factory.mktemp("checkout"))
    made = run(sys.executable, "setup.py", "sdist", cwd=source)
    assert made.returncode == 0, made.stderr
    (archive,) = (source / "dist").glob("*.tar.gz")
    target = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(archive, target, filter="data")
    (folder,) = target.iterdir()
    return folder


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty folder."""
    site = tmp_path_factory.mktemp("site")
    installed = pip("install", "--no-deps", "--no-compile", "--target", site, wheel)
    assert installed.returncode == 0, installed.stderr
    return site
