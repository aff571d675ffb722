"""Install the one build of FBGEMM that fits, from a checkout, a source archive or a wheel."""

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.unit.packaging.builds import CSRC, INSTALL, ROOT, clean_environment, run
from torchrec_checknrun import install
from torchrec_checknrun.version import __version__


def has(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Pretend that pip has installed these distributions and no others."""
    monkeypatch.setattr(install, "installed_version", installed.get)


class TestInstall:
    """Choose exactly one build of FBGEMM."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        commands: list[list[str]] = []

        def record(command: list[str]) -> int:
            commands.append(command[1:])
            return 0

        monkeypatch.setattr("subprocess.call", record)
        return commands

    @pytest.mark.parametrize(
        ("device", "build", "other"),
        [("cpu", "fbgemm-gpu-cpu", "fbgemm-gpu"), ("cuda", "fbgemm-gpu", "fbgemm-gpu-cpu")],
    )
    @pytest.mark.parametrize("other_is_there", [False, True])
    def test_one_build_is_installed(
        self,
        monkeypatch: pytest.MonkeyPatch,
        commands: list[list[str]],
        device: str,
        build: str,
        other: str,
        other_is_there: bool,
    ) -> None:
        has(monkeypatch, **({other: "1.8.0"} if other_is_there else {}))
        install.install(device, extras="test", editable=True)
        words = [word for command in commands if "install" in command for word in command]
        installed = {word.split("==")[0] for word in words if word.startswith("fbgemm")}
        assert installed == {build}
        (with_torchrec,) = (command for command in commands if "torchrec==1.8.0" in command)
        assert "--no-deps" in with_torchrec
        removed = [set(command[4:]) for command in commands if "uninstall" in command]
        assert removed == ([{build, other}] if other_is_there else [])

    def commands_of(
        self, file: Path, commands: list[list[str]], *arguments: str
    ) -> list[list[str]]:
        """Run another copy of install.py as a script would; return the commands for pip."""
        module = runpy.run_path(str(file))
        with patch.object(sys, "argv", ["install.py", "--device", "cpu", *arguments]):
            module["main"]()
        return commands

    def test_from_a_source_archive(self, unpacked: Path, commands: list[list[str]]) -> None:
        made = self.commands_of(unpacked / INSTALL, commands, "--extras", "cli")
        assert any(f"{unpacked}[cli]" in command for command in made)
        assert (unpacked / CSRC).is_file(), "the kernel can be built"
        helped = run(sys.executable, unpacked / INSTALL, "--help", env=clean_environment())
        assert "--device" in helped.stdout, "nothing but Python is needed"

    @pytest.mark.parametrize("extras", ["", "cli,s3"])
    def test_from_a_wheel(
        self, wheel: Path, site: Path, commands: list[list[str]], extras: str
    ) -> None:
        """Keep the package; ask pip for extras and everything that pip could not choose."""
        made = self.commands_of(site / INSTALL, commands, "--extras", extras)
        words = [word for command in made for word in command]
        named = [word for word in words if "torchrec_checknrun" in word and " " not in word]
        assert named == ([f"torchrec_checknrun[{extras}]=={__version__}"] if extras else [])
        fits = install.STACKS[install.Stack(torch.__version__, "", "").series].torchrec
        assert {f"torchrec=={fits}", *install.TORCHREC_NEEDS} <= set(words)
        helped = run(
            *(sys.executable, "-m", "torchrec_checknrun.install", "--help"),
            env=clean_environment(PYTHONPATH=str(site)),
            cwd=site.parent,
        )
        assert "--device" in helped.stdout, helped.stderr

    def test_from_a_wheel_nothing_is_editable(self, site: Path, commands: list[list[str]]) -> None:
        with pytest.raises(SystemExit, match="--editable needs the sources"):
            self.commands_of(site / INSTALL, commands, "--editable")
        assert commands == []

    def test_without_the_kernel_the_end_says_how_to_build_it(self, site: Path) -> None:
        check = run(
            *(sys.executable, "-c", install.CHECK, "cpu"),
            env=clean_environment(PYTHONPATH=str(site)),
            cwd=site.parent,
        )
        assert "without the compiled kernel" in check.stdout, check.stderr
        last = check.stdout.splitlines()[-1]
        assert "--no-build-isolation --no-deps --force-reinstall" in last
        assert last.endswith(f"torchrec_checknrun-{__version__}.tar.gz  (the source archive)")
        assert check.stderr.count("NumPy quantizes rows") == 1

    def test_the_old_place_still_works(self) -> None:
        helped = run(sys.executable, ROOT / "recipes" / "install.py", "--help")
        assert "--device" in helped.stdout

    @pytest.mark.parametrize(
        ("installed", "pinned", "fbgemm", "torchrec"),
        [
            (None, "2.13.0", "1.8.0", "1.8.0"),
            ("2.9.1", "2.9.1", "1.4.2", "1.4.0"),
            ("2.10.0+cpu", "2.10.0", "1.5.0", "1.5.1"),
            ("2.11.0", "2.11.0", "1.6.0", "1.6.1"),
            ("2.12.0+cpu", "2.12.0", "1.7.0", "1.7.0"),
            ("2.13.0+cu130", "2.13.0", "1.8.0", "1.8.0"),
            ("2.14.0", "2.14.0", "1.9.0", "1.9.2"),
        ],
    )
    def test_an_installed_torch_stays(
        self,
        monkeypatch: pytest.MonkeyPatch,
        commands: list[list[str]],
        installed: str | None,
        pinned: str,
        fbgemm: str,
        torchrec: str,
    ) -> None:
        has(monkeypatch, **({"torch": installed} if installed else {}))
        install.install("cpu", extras="", editable=False)
        *resolved, last, _ = commands  # the last command checks the installation
        assert len(resolved) == 2
        for command in resolved:
            (torch,) = (word for word in command if word.startswith("torch="))
            assert torch == f"torch=={pinned}"
        assert last[-3:] == ["--no-deps", f"torchrec=={torchrec}", f"fbgemm-gpu-cpu=={fbgemm}"]

    def test_a_torch_without_a_known_stack_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
    ) -> None:
        has(monkeypatch, torch="2.99.1+cpu")
        with pytest.raises(SystemExit, match=r"torch 2\.99\.1\+cpu is installed; .*--stack"):
            install.install("cpu", extras="", editable=False)
        assert not commands

    def test_another_stack_can_be_named(
        self, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
    ) -> None:
        monkeypatch.setattr(
            "sys.argv", ["install.py", "--device", "cpu", "--stack", "2.99.1,7.0.0,7.0.1"]
        )
        has(monkeypatch, torch="2.13.0")
        install.main()
        assert "torch==2.99.1" in commands[0]
        assert commands[-2][-2:] == ["torchrec==7.0.1", "fbgemm-gpu-cpu==7.0.0"]

    def test_a_failing_pip_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("subprocess.call", lambda command: 3)
        with pytest.raises(SystemExit, match=r"exit status 3: .* -m pip install"):
            install.install("cpu", extras="", editable=False)

    @pytest.mark.parametrize(
        ("script", "device"),
        [
            ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'", "cuda"),
            ("echo 'No devices were found'", "cpu"),
            ("echo 'GPU driver does not answer'; exit 9", "cpu"),
            (None, "cpu"),
        ],
    )
    def test_a_gpu_is_detected(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, device: str
    ) -> None:
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert install.detect_device() == device
