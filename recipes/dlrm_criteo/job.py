"""Watch a training job from outside: start torchrun, follow its events, kill a rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Event = dict[str, Any]
_POLL_SECONDS = 0.002


class JobFailed(RuntimeError):
    """The job ended with an error or broke an expectation."""


def start_script(*words: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a module as a script, in a session of its own: Ctrl-C goes to whoever watches it.

    Args:
        words: the module's name, and its arguments.
        log: file that what it prints is added to.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )


def cleared(root: Path, names: Iterable[str]) -> Path:
    """Make a folder, without what earlier runs of these names have left in it; all else stays."""
    root.mkdir(parents=True, exist_ok=True)
    for path in (root / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return root


class Job:
    """One `torchrun` of the trainer; as a context manager it leaves no process behind.

    Args:
        run_dir: directory of the trainer (`run_dir=`) and of its output (`output.log`).
        overrides: Hydra overrides of the trainer.
        ranks: worker processes.
        max_restarts: number of torchrun's restarts after the death of a worker.
        module: the trainer; tests replace it by a sabotaged one.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        *,
        ranks: int = 2,
        max_restarts: int = 0,
        module: str = "recipes.dlrm_criteo.train",
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        options = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={max_restarts}"]
        self._process = start_script(
            *("torch.distributed.run", *options, "-m", module, f"run_dir={run_dir}", *overrides),
            log=run_dir / "output.log",
        )
        self._pids: list[int] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            # torchrun ends its workers on SIGTERM; each worker is in a session of its own.
            self._process.terminate()
            try:
                self._process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pid in self._pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

    def events(self) -> Iterator[Event]:
        """Yield the lines of `train.jsonl` as they appear, until the job has succeeded.

        Raises:
            JobFailed: the job ended with an error; shows the end of its output.
        """
        path = self.run_dir / "train.jsonl"
        while not path.exists():
            if self._process.poll() is not None:
                self._check_exit()
            time.sleep(_POLL_SECONDS)
        with path.open() as lines:
            line = ""
            while True:
                ended = self._process.poll() is not None
                line += lines.readline()
                if line.endswith("\n"):  # an incomplete line is still being written
                    event = json.loads(line)
                    if event["event"] == "start":
                        self._pids = event["pids"]
                    line = ""
                    yield event
                elif ended:
                    break
                else:
                    time.sleep(_POLL_SECONDS)
        self._check_exit()

    def kill(self, rank: int) -> int:
        """Send SIGKILL to a rank's process; return its pid."""
        pid = self._pids[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def _check_exit(self) -> None:
        if self._process.returncode != 0:
            tail = (self.run_dir / "output.log").read_text(errors="replace").splitlines()[-40:]
            raise JobFailed(
                f"the job in {self.run_dir} ended with exit status {self._process.returncode}:\n"
                + "\n".join(tail)
            )


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
