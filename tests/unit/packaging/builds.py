"""Copy the sources, build a wheel and run commands as a user would."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


INSTALL = "torchrec_checknrun/install.py"


CSRC = "torchrec_checknrun/csrc/rows.h"


SOURCES = ["LICENSE", "README.md", "pyproject.toml", "setup.py", "torchrec_checknrun"]


def run(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def pip(
    command: str, *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", command, "--no-index", *arguments, env=env)


def clean_environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **variables}


def copy_sources(target: Path) -> Path:
    """Copy this checkout without build products, which a build leaves beside the sources."""
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=built)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def build_wheel(source: Path, target: Path, env: dict[str, str] | None = None) -> tuple[Path, str]:
    """Build a wheel; return its path and the build's output."""
    options = ("--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", target)
    built = pip("wheel", *options, source, env=env)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return path, built.stdout + built.stderr


def members(wheel: Path) -> set[str]:
    """List a wheel's files, without the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}
