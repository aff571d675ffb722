"""Run the commands and Python blocks of README, CONTRIBUTING and docs; see ``blocks``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.docs.blocks import PAGES, REPOSITORY, Block, blocks_of
from tests.docs.job import Job
from tests.docs.test_public_behaviour import names_in
from tests.groups import end_process_group
from tests.unit.chains import one_thread
from torchrec_checknrun import Checkpointer, Consecutive, Quantization, elastic
from torchrec_checknrun.cli import main as checknrun
from torchrec_checknrun.hydra_config.config import register

EMPTY_AT_FIRST = ("README.md", "docs/tutorials/first_checkpoint.md")
"""Pages whose first block starts the run that later blocks use."""
ID = re.compile(r"seq-(\d{6})_step-\d{8}_[0-9a-f]{8}")
JOINS = re.compile(r"^init_process_group\(\)", re.MULTILINE)
INSTALLS = {"torchrec_checknrun/install.py", "torchrec_checknrun.install", "recipes.versions"}
"""Commands that install packages or take many minutes."""
ALL = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_thread():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        end_process_group()


@pytest.fixture(scope="module")
def run_17(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the run of seven checkpoints that the pages use."""
    root = tmp_path_factory.mktemp("pages") / "run-17"
    job = Job()
    with Checkpointer(
        root,
        model=job.dmp,
        state={"optimizer": job.optimizer, "reader": job.reader},
        policy=Consecutive(),
        quantization=Quantization(bits=4),
        every_steps=10,
        when_busy="wait",
        retention=None,
    ) as checkpointer:
        job.train(70, checkpointer.step)
    return root


class Session:
    """A page's blocks in order, in one folder and one namespace."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._roots = folder / "checkpoints"
        self._roots.mkdir()
        self._folder, self._capsys = folder, capsys
        self._open: list[Any] = []
        self.names: dict[str, Any] = {"example": self._example, "torch": torch}
        self._made = 0
        self._set_job()

    def _set_job(self) -> None:
        """Make the job that a page trains, in the current process group."""
        job = Job()
        self.names |= {
            "dmp": job.dmp,
            "model": job.dmp,
            "optimizer": job.optimizer,
            "reader": job.reader,
            "train_step": job.unhurried_step,
            "job": job,
        }

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._python(block)
        elif block.language == "yaml":
            _compose(block, self)
        else:
            self._shell(block)

    def close(self) -> None:
        for name in ("checkpointer", "tracked"):
            if hasattr(made := self.names.pop(name, None), "close"):
                made.close()
        while self._open:
            self._open.pop().close()

    def local(self, text: str) -> str:
        """Replace the page's places by the test's folder, and the page's ids by this run's."""
        text = re.sub(r"(?:s3://bucket|/checkpoints)(?=/)", str(self._roots), text)
        root = self._roots / "run-17"
        found = {path.name[4:10]: path.name for path in root.glob("seq-*")}
        return ID.sub(lambda match: found.get(match[1], match[0]), text)

    def _python(self, block: Block) -> None:
        text = re.sub(r"Checkpointer\(\s*\.\.\.,", "example(", self.local(block.text))
        if re.search(r"\bCheckpointer\(|example\(", text):
            self.close()
        if JOINS.search(text):  # a page's job needs its process group
            self.close()
            end_process_group()
            elastic.init_process_group()
            self._set_job()
            text = JOINS.sub("pass", text)
        code = compile("\n" * (block.line) + text, block.page, "exec")
        exec(code, self.names)

    def _example(self, **arguments: Any) -> Checkpointer:
        self.close()
        self._made += 1
        job: Job = self.names["job"]
        state = arguments.pop("state", {"optimizer": job.optimizer, "reader": job.reader})
        root = self._roots / f"example-{self._made}"
        made = Checkpointer(root, model=job.dmp, state=state, **arguments)
        self._open.append(made)
        return made

    def _shell(self, block: Block) -> None:
        shown = block.text.split("$ ")[1:] if block.language == "console" else []
        for number, words in enumerate(block.commands):
            printed = self._command([self.local(word) for word in words], block)
            if shown:
                self._compare(shown[number].splitlines()[1:], printed, block)

    def _command(self, words: list[str], block: Block) -> str:
        where = f"{block.page}:{block.line}: {' '.join(words)}"
        if words[0] == "checknrun":
            words = [str(self._roots / word) if word == "run-17" else word for word in words]
            self._capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                checknrun(words[1:])
            printed = self._capsys.readouterr()
            assert ended.value.code in (0, None), f"{where}: {printed.err}"
            return printed.out
        assert words[0] == "python", (
            f"{where}: name the test that runs this block, or say that it takes long"
        )
        assert not INSTALLS & set(words), f"{where}: a test must not change this environment"
        script = [str(REPOSITORY / word) if word.endswith(".py") else word for word in words[1:]]
        done = subprocess.run(
            [sys.executable, *script], cwd=self._folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{where}: {done.stderr}"
        return done.stdout

    @staticmethod
    def _compare(shown: list[str], printed: str, block: Block) -> None:
        """Compare the heading of a table, and all cells that are plain arithmetic."""
        wanted = [line.split() for line in shown if line.strip()]
        found = [line.split() for line in printed.splitlines() if line.strip()]
        if "plan" in block.commands[0][:2]:
            assert found[: len(wanted)] == wanted
        elif wanted and not any(map(str.isdigit, " ".join(wanted[0]))):
            assert found[0] == wanted[0], f"{block.page}:{block.line}"


def _compose(block: Block, session: Session) -> None:
    """Read a Hydra app's config into ``cfg``."""
    from hydra import compose, initialize_config_dir

    folder = session._folder / "conf"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(session.local(block.text))
    register()
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose("config")
    OmegaConf.resolve(cfg)
    session.names["cfg"] = cfg


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_blocks_of_the_page_run(
    page: str,
    run_17: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session(tmp_path, capsys)
    if page not in EMPTY_AT_FIRST:
        shutil.copytree(run_17, tmp_path / "checkpoints" / "run-17")
    try:
        for block in blocks_of(page):
            if not block.long and block.run_by is None:
                session.run(block)
    finally:
        session.close()


def test_others_are_run_by_tests_that_exist() -> None:
    for block in ALL:
        if block.run_by is not None:
            path, name = block.run_by
            assert name in names_in(path), f"{block.page}:{block.line}"


def test_four_of_five_are_run() -> None:
    everything = sum(block.size for block in ALL)
    run = sum(block.size for block in ALL if not block.long)
    assert run >= 0.8 * everything, f"{run} of {everything} commands and blocks are run"
