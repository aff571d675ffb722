"""Make the environment once, and again when its sources or choices change."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.packaging.builds import CSRC, INSTALL, ROOT, clean_environment, run

MADE_FROM = ["Makefile", INSTALL, "pyproject.toml", "setup.py"]


class TestMakefile:
    """Check when `make` makes the environment, and how."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        """Make a checkout whose environment was made by python3 and is newer than its sources."""
        (tmp_path / CSRC).parent.mkdir(parents=True)
        for name in (*MADE_FROM, CSRC):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1, 1))
        (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
        os.utime(tmp_path / "Makefile", (1, 1))
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / ".made").write_text(f"python3 auto {tmp_path}\n")
        return tmp_path

    def make(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in clean_environment().items()
            if not name.startswith(("MAKE", "MFLAGS")) and name not in ("DATA", "DEVICE", "ARGS")
        }
        return run("make", "--no-print-directory", *arguments, cwd=folder, env=kept)

    def is_up_to_date(self, folder: Path, *arguments: str) -> bool:
        return self.make(folder, "--question", "env", *arguments).returncode == 0

    def test_is_made_once(self, made: Path) -> None:
        assert self.is_up_to_date(made)
        assert self.is_up_to_date(made, "PYTHON=python3")

    def change(self, folder: Path, *names: str) -> None:
        later = (folder / ".venv" / ".made").stat().st_mtime + 10
        for name in names:
            os.utime(folder / name, (later, later))

    @pytest.mark.parametrize("name", MADE_FROM)
    def test_is_made_again_when_a_file_changed(self, made: Path, name: str) -> None:
        self.change(made, name, CSRC)
        assert not self.is_up_to_date(made)
        steps = self.make(made, "--dry-run", "env").stdout
        assert f"-m venv --clear .venv\nPIP_NO_COMPILE=0 .venv/bin/python {INSTALL}" in steps
        assert "build_ext" not in steps

    def test_only_the_kernel_is_made_again_when_only_that_changed(self, made: Path) -> None:
        self.change(made, CSRC)
        steps = self.make(made, "--dry-run", "env").stdout.splitlines()
        assert steps[0] == ".venv/bin/python setup.py --quiet build_ext --inplace"
        assert "venv --clear" not in " ".join(steps)

    def test_is_made_again_for_another_choice(self, made: Path) -> None:
        assert not self.is_up_to_date(made, "PYTHON=python3.99")
        assert not self.is_up_to_date(made, "DEVICE=cuda")
        assert "venv --clear" in self.make(made, "--dry-run", "env", "DEVICE=cuda").stdout

    def test_is_made_again_after_a_move(self, made: Path) -> None:
        moved = made.rename(made.with_name("moved"))
        assert not self.is_up_to_date(moved)

    def test_the_choice_stays(self, made: Path) -> None:
        (made / ".venv" / ".made").write_text(f"python3.99 cuda {made}\n")
        assert self.is_up_to_date(made)

    def test_a_missing_python_is_named(self, made: Path) -> None:
        result = self.make(made, "env", "PYTHON=python3.99")
        assert result.returncode != 0
        assert "python3.99 is missing or older than 3.10" in result.stdout

    def test_demo_passes_the_data_on(self, made: Path) -> None:
        with_data = self.make(made, "--dry-run", "demo", "DATA=my data/train.txt").stdout
        assert with_data.rstrip().endswith("-m recipes.dlrm_criteo.demo --data 'my data/train.txt'")
        assert self.make(made, "--dry-run", "demo").stdout.rstrip().endswith(".demo")

    def test_the_online_demo_passes_the_data_on(self, made: Path) -> None:
        module = "-m recipes.dlrm_criteo.online_demo"
        with_data = self.make(made, "--dry-run", "demo-online", "DATA=my data/train.txt").stdout
        assert with_data.rstrip().endswith(f"{module} --data 'my data/train.txt'")
        assert self.make(made, "--dry-run", "demo-online").stdout.rstrip().endswith(module)
