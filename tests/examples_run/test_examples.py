"""Run every example and check its promises; make the extensions also by name from Hydra."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException

from tests.distributed.fork_server import REPOSITORY
from tests.groups import end_process_group
from torchrec_checknrun import verify

EXAMPLES = REPOSITORY / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Import examples by the names that scripts see; each begins without a process group."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    end_process_group()


def run(example: str, *arguments: Any) -> Any:
    """Call an example's ``main`` as its last lines would."""
    try:
        return importlib.import_module(example).main(*arguments)
    finally:
        end_process_group()


def hydra_app(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Run the Hydra app in this process, where errors can be seen."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["hydra_app.py", *overrides])
    GlobalHydra.instance().clear()
    try:
        runpy.run_path(str(EXAMPLES / "hydra_app.py"), run_name="__main__")
    finally:
        end_process_group()


def is_sound(root: Path | str) -> bool:
    """Read every byte of a root."""
    found = verify(root)
    return len(found) > 0 and not any(checkpoint.problems for checkpoint in found)


def field(root: Path, name: str) -> list[Any]:
    """List a field of the manifests in a root, oldest first."""
    files = sorted(root.glob("*/manifest.json"))
    return [json.loads(file.read_bytes())["manifest"][name] for file in files]


def kinds(root: Path) -> list[str]:
    """List the kinds of a root's checkpoints, oldest first."""
    return field(root, "kind")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith('"""')
    assert (EXAMPLES / "README.md").read_text().count(f"({path.name})") == 1


def test_minimal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("minimal", str(tmp_path / "run"), 12)
    run("minimal", str(tmp_path / "run"), 12)
    printed = capsys.readouterr().out
    assert "trained steps 0 to 12" in printed
    assert "trained steps 12 to 24" in printed
    assert is_sound(tmp_path / "run")


@pytest.mark.parametrize("example", ["minimal", "foreign_dlrm"])
@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, example: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / f"{example}.py"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, *script], env=environment, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert is_sound(tmp_path / "run")


def test_dcp_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("dcp_only", str(tmp_path))
    full, differential = map(int, re.findall(r"(\d+) bytes", capsys.readouterr().out))
    assert 0 < differential < full


def test_track_only() -> None:
    counts = run("track_only")
    assert all(0 < count <= 5 * 64 for count in counts.values())


def test_foreign_dlrm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("foreign_dlrm", str(tmp_path / "run"))
    assert "epoch 1: step 40" in capsys.readouterr().out
    run("foreign_dlrm", str(tmp_path / "run"))
    assert "epoch" not in capsys.readouterr().out, "the job was done"


def test_foreign_dlrm_without_the_added_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the added lines: the rest is the foreign program, whose training stays the same."""
    run("foreign_dlrm", str(tmp_path / "run"))
    wanted = capsys.readouterr().out.splitlines()[-1]
    lines = (EXAMPLES / "foreign_dlrm.py").read_text().splitlines()
    added = [line for line in lines if "# +" in line and not line.startswith('"""')]
    assert len(added) <= 14
    left = [line for line in lines if line not in added]
    (tmp_path / "foreign_alone.py").write_text("\n".join(left))
    assert "heckpoint" not in "\n".join(left[4:])
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    run("foreign_alone", "")
    assert capsys.readouterr().out.splitlines()[-1] == wanted


def test_convert_dcp_script(tmp_path: Path) -> None:
    module = importlib.import_module("convert_dcp_script")
    losses = []
    for way in (module.before, module.after):
        module.init_process_group()
        losses.append(way(str(tmp_path / way.__name__)))
        end_process_group()
    assert losses[0] == losses[1] > 0
    module.init_process_group()
    assert module.before(str(tmp_path / "before")) == 0, "nothing is left to train"
    assert module.after(str(tmp_path / "after")) == 0
    assert kinds(tmp_path / "after")[-1] == "differential"


def test_data_position(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    seen = [run("data_position", str(tmp_path), stop) for stop in (7, 22, 40)]
    assert [len(numbers) for numbers in seen] == [7, 15, 18]
    assert run("data_position", str(tmp_path), 40) == [], "nothing is left"
    assert sorted(number for numbers in seen for number in numbers) == list(range(40)), (
        "every batch once"
    )


@pytest.mark.parametrize("example", ["custom_policy", "custom_trigger", "custom_codec"])
def test_nothing_of_a_job_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, example: str
) -> None:
    """Go on in a second run after the steps of the first one, with the optimizer's state."""
    root, others = tmp_path / "run", ["now"] if example == "custom_trigger" else []
    run(example, str(root), *others)
    first = max(field(root, "step"))
    run(example, str(root), *others)
    assert max(field(root, "step")) == 2 * first > 0
    assert "is not among the state objects" not in caplog.text


class TestExtensions:
    """Use each extension from one file outside of the package: from Python, and from Hydra."""

    def test_policy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run("custom_policy", str(tmp_path / "python"))
        policy = "checkpoint.policy={_target_: custom_policy.Budget, fraction: 0.01}"
        options = ("checkpoint.every_steps=1", "checkpoint.when_busy=wait", "checkpoint.keep=null")
        root = f"checkpoint.root={tmp_path}/hydra"
        hydra_app(monkeypatch, root, policy, *options, "steps=6")
        assert kinds(tmp_path / "hydra") == ["full", "differential"] * 3
        assert len(kinds(tmp_path / "python")) >= 2

    def test_trigger(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = tmp_path / "now"
        run("custom_trigger", str(tmp_path / "python"), str(now))
        assert kinds(tmp_path / "python") == ["full"]
        now.touch()
        trigger = f"checkpoint.triggers=[{{_target_: custom_trigger.WhenAsked, path: {now}}}]"
        root = f"checkpoint.root={tmp_path}/hydra"
        hydra_app(monkeypatch, root, trigger, "checkpoint.every_steps=null")
        assert kinds(tmp_path / "hydra") == ["full"]
        assert not now.exists()

    def test_codec(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(2):  # the second run restores
            run("custom_codec", str(tmp_path / "python"))
        codec = "checkpoint.codec={_target_: custom_codec.FixedPoint}"
        for _ in range(2):
            hydra_app(
                monkeypatch, f"checkpoint.root={tmp_path}/hydra", codec, "checkpoint.at_end=true"
            )
        for folder in ("python", "hydra"):
            assert is_sound(tmp_path / folder)
            stored = b"".join(p.read_bytes() for p in (tmp_path / folder).glob("*/*"))
            assert b"example_fixed_point" in stored

    def test_store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root = f"sqlite://{tmp_path}/jobs.db/run"
        run("custom_store", root, 12)
        overrides = (f"checkpoint.root={root}", "checkpoint.every_steps=5", "steps=8")
        hydra_app(monkeypatch, "imports=[custom_store]", *overrides, "checkpoint.resume=must")
        assert "trained to step 20" in capsys.readouterr().out
        assert is_sound(root)
        assert {path.name for path in tmp_path.iterdir()} == {"jobs.db", "hydra_app.log"}

    def test_multirun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Run jobs in one process, each from its own root; tell of a root that they share."""
        options = ("-m", "checkpoint.bits=8,4", "checkpoint.at_end=true", "hydra.sweep.dir=sweep")
        for _ in range(2):  # the second sweep goes on, each job from its own
            hydra_app(monkeypatch, *options, f"checkpoint.root={tmp_path}/${{hydra:job.num}}")
        for job in "01":
            assert kinds(tmp_path / job) == ["full", "differential"]
        told = "jobs 0 and 1 of this multirun have one root"
        assert told not in capsys.readouterr().out
        hydra_app(monkeypatch, *options, f"checkpoint.root={tmp_path}/both")
        assert capsys.readouterr().out.count(f"{told}, {tmp_path}/both") == 1

    def test_a_name_that_is_wrong(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = "checkpoint.policy={_target_: custom_policy.Bugdet}"
        with pytest.raises(InstantiationException, match="Bugdet"):
            hydra_app(monkeypatch, f"checkpoint.root={tmp_path}", policy)
