"""Interpret an installation and pytest's results as `make versions` does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import versions
from torchrec_checknrun.install import DEFAULT, STACKS, Stack

CASES = """
import pytest

class TestInside:
    @pytest.mark.parametrize("name", ["a.b", "c[d]"])
    def test_body(self, name):
        assert name == "a.b"

def test_passes():
    pass

def test_is_skipped():
    pytest.skip("for a reason")

@pytest.fixture
def torn():
    yield
    raise RuntimeError("torn down")

def test_fails_twice(torn):
    assert False
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return pytest's results of passing, failing and skipped tests, and of a failed import."""
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_cases.py").write_text(CASES)
    (tmp_path / "unit" / "test_missing.py").write_text("import no_such_module")
    path = tmp_path / "results.xml"
    options = ["-o", "junit_family=xunit1", f"--junitxml={path}", "--continue-on-collection-errors"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "unit"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return path


def test_results_are_counted(results: Path) -> None:
    assert versions.count(results) == {
        "passed": 2,
        "failed": 3,
        "skipped": 1,
        "failures": [
            "unit/test_cases.py::TestInside::test_body[c[d]]",
            "unit/test_cases.py::test_fails_twice",
            "unit/test_missing.py",
        ],
    }


@pytest.mark.parametrize("known", [True, False])
def test_a_torch_outside_the_requirement_is_allowed_in_the_copy_alone(
    tmp_path: Path, known: bool
) -> None:
    before = (versions.ROOT / "setup.py").read_text()
    versions.copy_tree(tmp_path / "tree", DEFAULT if known else Stack("2.99.0", "9", "9"))
    copied = (tmp_path / "tree" / "setup.py").read_text()
    assert (copied == before) is known
    assert ('    "torch",' in copied) is not known
    assert (versions.ROOT / "setup.py").read_text() == before
    assert (tmp_path / "tree" / "torchrec_checknrun" / "csrc" / "rows.h").exists()
    assert not list((tmp_path / "tree").rglob("*.so"))


def test_a_stack_that_cannot_be_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, stack: Stack) -> Path:
        raise versions.StackError("no such version")

    monkeypatch.setattr(versions, "install", refuse)
    path = tmp_path / "versions.json"
    code = versions.main(["--stack", "2.99.0,9.0.0,9.0.1", "--quick", "--json", str(path)])
    assert code
    (row,) = versions.read(path)
    assert (row["torch"], row["problem"]) == ("2.99.0", "no such version")
    assert "| 2.99.0 | 9.0.0 | 9.0.1 | not installed | – | – | – |" in versions.table([row])


def test_environments_are_kept_in_a_folder_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(versions, "install", lambda folder, stack: made.append(folder))
    folder = tmp_path / "new" / "environments"
    options = ["--stack", "2.99.0,9.0.0,9.0.1", "--keep", "--folder", str(folder), "--install-only"]
    assert not versions.main(options)
    assert made == [folder / "2.99.0"]


def test_failing_tests_alone_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "versions.json"
    stack = {"torch": "2.99.0", "fbgemm": "9.0.0", "torchrec": "9.0.1", "installed": {}}
    counts = {"passed": 1300, "failed": 2, "skipped": 2, "failures": ["a.py::b", "a.py::c"]}
    versions.write(path, {**stack, "tests": "quick", **counts})

    def run(folder: Path, stack: Stack, tests: list[str], minutes: float) -> versions.Row:
        assert tests == ["a.py::b", "a.py::c"]
        again = {"passed": 1, "failed": 1, "skipped": 0, "failures": ["a.py::c"]}
        return {**stack._asdict(), "tests": " ".join(tests), "installed": {}, **again}

    monkeypatch.setattr(versions, "try_stack", run)
    assert versions.main(["--stack", "2.99.0,9.0.0,9.0.1", "--failed", "--json", str(path)])
    (row,) = versions.read(path)
    assert (row["passed"], row["failed"], row["skipped"]) == (1301, 1, 2)
    assert (row["tests"], row["failures"]) == ("quick", ["a.py::c"])


def _running() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_tests_that_hang_are_ended(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "test_hangs.py").write_text(
        "import subprocess\n\ndef test_it():\n    subprocess.run(['sleep', '987654'])\n"
    )
    with pytest.raises(versions.StackError, match="not finished after 6 s"):
        versions.run_tests(tmp_path, Path(sys.executable), ["test_hangs.py"], minutes=0.1)
    end = time.monotonic() + 60
    while "sleep 987654" in _running():  # a killed process takes a moment on a busy machine
        assert time.monotonic() < end
        time.sleep(0.05)


def test_results_are_kept_by_torch_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    row = {"fbgemm": "1", "torchrec": "1", "tests": "quick", "installed": {}}
    counts = {"passed": 1300, "failed": 0, "skipped": 2, "failures": []}
    for torch in ("2.11.0", "2.9.1", "2.11.0"):
        versions.write(path, {"torch": torch, **row, **counts})
        counts = {**counts, "failed": 1, "failures": ["unit/test_a.py::test_b"]}
    assert [row["torch"] for row in versions.read(path)] == ["2.9.1", "2.11.0"]
    table = versions.table(versions.read(path))
    assert "| 2.11.0 | 1 | 1 | quick | 1,300 | 1 | 2 |" in table
    assert table.endswith("torch 2.11.0 fails:\n\n- `unit/test_a.py::test_b`")


def test_the_committed_results_are_of_the_stacks_that_install_knows() -> None:
    """Offer a stack only after its tests ran; the default's tests are those of `make test`."""
    rows = {row["torch"]: row for row in versions.read(versions.RESULTS)}
    for stack in STACKS.values():
        if stack is not DEFAULT:
            row = rows[stack.torch]
            assert (row["fbgemm"], row["torchrec"]) == (stack.fbgemm, stack.torchrec)
            assert row["passed"] > 1000
            assert row["failures"] == []
            assert row["installed"]["kernel"]
