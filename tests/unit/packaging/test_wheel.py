"""Put the package, the plugin and the requirements into the wheel, and nothing else."""

import os
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.packaging.builds import (
    INSTALL,
    ROOT,
    build_wheel,
    clean_environment,
    copy_sources,
    members,
    run,
)
from torchrec_checknrun import install
from torchrec_checknrun.version import __version__


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
        "torchrec_checknrun/__init__.pyi",  # all public names, without which no import works
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
    """Find the FBGEMM and TorchRec of every accepted torch in install.py."""
    (torch,) = (
        requirement
        for requirement in map(Requirement, metadata.get_all("Requires-Dist", []))
        if requirement.name == "torch"
    )
    accepted = {f"2.{minor}" for minor in range(40) if torch.specifier.contains(f"2.{minor}.0")}
    assert accepted == set(install.STACKS)


def test_an_outside_script_imports_this_checkout(tmp_path: Path) -> None:
    """Import the checkout in the processes of ranks and crash tests, never an older copy."""
    script = tmp_path / "script.py"
    script.write_text("import torchrec_checknrun.version as v; print(v.__file__)")
    result = run(sys.executable, script, cwd=tmp_path, env=clean_environment())
    assert result.stdout.strip() == str(ROOT / "torchrec_checknrun" / "version.py"), (
        f"Install the checkout in place: python {INSTALL} --editable\n{result.stderr}"
    )
