"""The package as its users get it: what the wheel holds, how it is installed, who can use it."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement

from torchrec_checknrun import install
from torchrec_checknrun.version import __version__

ROOT = Path(__file__).resolve().parents[2]
INSTALL = "torchrec_checknrun/install.py"
MADE_FROM = ["Makefile", INSTALL, "pyproject.toml", "setup.py"]
CSRC = "torchrec_checknrun/csrc/rows.h"
SOURCES = ["LICENSE", "README.md", "pyproject.toml", "setup.py", "torchrec_checknrun"]

APP = """
import hydra
from omegaconf import DictConfig, OmegaConf
import hydra_plugins.torchrec_checknrun_plugin as plugin
import torchrec_checknrun.version as version

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    print(OmegaConf.to_yaml(cfg.checkpoint))
    print("plugin:", plugin.__file__)
    print("package:", version.__file__)

main()
"""


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
    """This checkout without what was built in it: a build leaves files beside the sources."""
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=built)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def build_wheel(source: Path, target: Path, env: dict[str, str] | None = None) -> tuple[Path, str]:
    """The wheel and what was printed."""
    options = ("--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", target)
    built = pip("wheel", *options, source, env=env)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return path, built.stdout + built.stderr


def members(wheel: Path) -> set[str]:
    """What is in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The wheel where every compiler fails, which saves the time that a compiler takes."""
    source = copy_sources(tmp_path_factory.mktemp("source"))
    env = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    return build_wheel(source, tmp_path_factory.mktemp("wheel"), env)


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, str]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_package_and_the_plugin_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    package = ROOT / "torchrec_checknrun"
    plugin = package / "hydra_plugin"
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*.py")
        if not path.is_relative_to(plugin)
    }
    assert members(wheel) == {
        *sources,
        "torchrec_checknrun/__init__.pyi",  # all public names: needed to import any
        "torchrec_checknrun/py.typed",
        "hydra_plugins/torchrec_checknrun_plugin.py",
    }
    assert len(licences) == 1


def test_without_a_compiler_one_line_names_the_remedy(built: tuple[Path, str]) -> None:
    (line,) = (line for line in built[1].splitlines() if "without its compiled kernel" in line)
    assert "/bin/false" in line
    assert "install torch and g++" in line


def test_the_kernel_is_left_out_on_request_and_an_earlier_one_removed(tmp_path: Path) -> None:
    source = copy_sources(tmp_path)
    earlier = source / "torchrec_checknrun" / "_C.so"
    earlier.touch()
    environment = {**os.environ, "CHECKNRUN_NO_EXTENSION": "1"}
    built = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=source, env=environment)
    assert built.returncode == 0, built.stderr
    assert "CHECKNRUN_NO_EXTENSION is set" in built.stderr
    assert not earlier.exists()


@pytest.mark.slow
def test_the_wheel_of_a_source_archive_holds_the_kernel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = copy_sources(tmp_path / "source")
    run(sys.executable, "setup.py", "sdist", cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    compiled, output = build_wheel(archive, tmp_path)
    (library,) = members(compiled) - members(wheel)
    with zipfile.ZipFile(compiled) as content:
        content.extractall(tmp_path)
    code = f"import torch; torch.ops.load_library({str(tmp_path / library)!r}); "
    loaded = run(sys.executable, "-c", code + "print(torch.ops.checknrun.kernel_builds())")
    assert "plain" in loaded.stdout, output + loaded.stderr


def test_version_has_one_source(wheel: Path, metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert wheel.name.startswith(f"torchrec_checknrun-{__version__}-")
    assert __version__ not in (ROOT / "setup.py").read_text()


def test_requirements_leave_the_build_of_fbgemm_open_and_agree_with_install(
    metadata: Message,
) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    names = {requirement.name for requirement in requirements}
    assert "torch" in names
    assert not names & {"torchrec", *install.FBGEMM.values()}
    torches = [f"torch=={stack.torch}" for stack in install.STACKS.values()]
    pins = [
        (pin.name, specifier.version)
        for pin in map(Requirement, (*torches, *install.TORCHREC_NEEDS))
        for specifier in pin.specifier
        if specifier.operator == "=="
    ]
    shared = [
        (requirement, version)
        for requirement in requirements
        for name, version in pins
        if name == requirement.name
    ]
    assert {requirement.name for requirement, _ in shared} >= {"torch", "torchmetrics"}
    for requirement, version in shared:
        assert requirement.specifier.contains(version), requirement


def test_torch_is_required_as_far_as_stacks_are_known(metadata: Message) -> None:
    """Each torch that pip accepts has its FBGEMM and TorchRec in install.py."""
    (torch,) = (
        requirement
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", []))
        if requirement.name == "torch"
    )
    accepted = {f"2.{minor}" for minor in range(40) if torch.specifier.contains(f"2.{minor}.0")}
    assert accepted == set(install.STACKS)


def test_an_outside_script_imports_this_checkout(tmp_path: Path) -> None:
    """Ranks and crash tests run in processes of their own, which must not test an older copy."""
    script = tmp_path / "script.py"
    script.write_text("import torchrec_checknrun.version as v; print(v.__file__)")
    result = run(sys.executable, script, cwd=tmp_path, env=clean_environment())
    assert result.stdout.strip() == str(ROOT / "torchrec_checknrun" / "version.py"), (
        f"Install the checkout in place: python {INSTALL} --editable\n{result.stderr}"
    )


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked, and nothing else."""
    source = copy_sources(tmp_path_factory.mktemp("checkout"))
    made = run(sys.executable, "setup.py", "sdist", cwd=source)
    assert made.returncode == 0, made.stderr
    (archive,) = (source / "dist").glob("*.tar.gz")
    target = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(archive, target, filter="data")
    (folder,) = target.iterdir()
    return folder


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel."""
    site = tmp_path_factory.mktemp("site")
    installed = pip("install", "--no-deps", "--no-compile", "--target", site, wheel)
    assert installed.returncode == 0, installed.stderr
    return site


class TestOtherHydraApp:
    """An application elsewhere, with only the wheel installed."""

    @pytest.fixture
    def app(self, tmp_path: Path) -> Path:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "config.yaml").write_text('defaults: [{checkpoint: "off"}, _self_]\n')
        (tmp_path / "app.py").write_text(APP)
        return tmp_path

    def start(
        self, app: Path, site: Path | None, *overrides: str
    ) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(**({"PYTHONPATH": str(site)} if site else {}))
        return run(sys.executable, "app.py", *overrides, cwd=app, env=environment)

    def test_switch(self, app: Path, site: Path) -> None:
        result = self.start(app, site, "checkpoint=check_n_run", "checkpoint.every_steps=7")
        assert result.returncode == 0, result.stderr
        assert "every_steps: 7" in result.stdout
        assert f"plugin: {site}/hydra_plugins/torchrec_checknrun_plugin.py" in result.stdout
        assert f"package: {site}/torchrec_checknrun/version.py" in result.stdout

    def test_switch_with_the_package_installed_in_place(self, app: Path) -> None:
        result = self.start(app, None, "checkpoint=check_n_run", "checkpoint.every_steps=7")
        assert result.returncode == 0, result.stderr
        assert "every_steps: 7" in result.stdout
        assert f"plugin: {ROOT}/torchrec_checknrun/hydra_plugin/" in result.stdout

    @pytest.mark.parametrize(
        ("overrides", "named"),
        [
            (["checkpoint=chek_n_run"], "chek_n_run"),
            (["checkpoint=check_n_run", "checkpoint.evry_steps=1"], "evry_steps"),
            (["checkpoint=check_n_run", "checkpoint.every_steps=often"], "often"),
        ],
    )
    def test_a_typo_fails_at_start(
        self, app: Path, site: Path, overrides: list[str], named: str
    ) -> None:
        result = self.start(app, site, *overrides)
        assert result.returncode != 0
        assert named in result.stderr
        assert "plugin:" not in result.stdout


def has(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    """Let these distributions be all that pip has installed."""
    monkeypatch.setattr(install, "installed_version", installed.get)


class TestInstall:
    """Exactly one build of FBGEMM is chosen, from a checkout, a source archive or a wheel."""

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
    def test_one_build(
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
        """Run another copy of install.py as a script would; what pip was to do."""
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
        """The package is there; pip is asked for what it could not choose, and for extras."""
        made = self.commands_of(site / INSTALL, commands, "--extras", extras)
        words = [word for command in made for word in command]
        named = [word for word in words if "torchrec_checknrun" in word and " " not in word]
        assert named == ([f"torchrec_checknrun[{extras}]=={__version__}"] if extras else [])
        assert {"torchrec==1.8.0", *install.TORCHREC_NEEDS} <= set(words)
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
        *resolved, last, _ = commands  # the last one is the check of the installation
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
    def test_detection(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, device: str
    ) -> None:
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert install.detect_device() == device


class TestMakefile:
    """The environment is made once, and again when what it was made from changes."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Path:
        """A checkout whose environment was made by python3 and is newer than its sources."""
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
        assert f"-m venv --clear .venv\n.venv/bin/python {INSTALL}" in steps
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
