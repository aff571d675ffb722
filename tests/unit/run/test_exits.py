"""End a program by an error while a checkpoint is on its way: its own exit code stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time

atexit.register(lambda: print("alive" if writers[0].is_alive() else "ended"))  # called last

from unittest import mock

import torch

from torchrec_checknrun import Checkpointer
from torchrec_checknrun.save import background

begun, writers = threading.Event(), []

def slowly(*_, **__):
    writers.append(threading.current_thread())
    begun.set()
    time.sleep(1.0)
    raise OSError("no space left, says the test")

with mock.patch.object(background, "write_rank_file", slowly):
    saver = Checkpointer(sys.argv[1], model=torch.nn.Linear(2, 2))
    saver.save(wait=False)
    begun.wait()
    if sys.argv[2] == "block":
        with saver:
            raise SystemExit(5)
    raise SystemExit(5) if sys.argv[2] == "exit" else ValueError("says the test")
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("error", 1),
        pytest.param("exit", 5, marks=pytest.mark.slow),
        pytest.param("block", 5, marks=pytest.mark.slow),
    ],
)
def test_no_thread_of_a_save_outlives_the_interpreter(tmp_path: Path, how: str, code: int) -> None:
    """A thread that PyTorch returns to an interpreter that has ended aborts the process."""
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "root"), how]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == "ended\n"


HANGING = """
import atexit, sys, time
from datetime import timedelta

class Ending:
    def __del__(self, sleep=time.sleep):  # when the interpreter has ended
        sleep(2.5)

time.kept = Ending()

from unittest import mock

import torch

from torchrec_checknrun import Checkpointer, threads
from torchrec_checknrun.save import background

threads._END_SECONDS = 0.2
store = torch.distributed.HashStore()

def hang(*_, **__):  # as in a collective that waits for a rank
    store.wait(["never"], timedelta(seconds=1.5))

with mock.patch.object(background, "write_rank_file", hang):
    Checkpointer(sys.argv[1], model=torch.nn.Linear(2, 2)).save(wait=False)
    time.sleep(0.3)
    raise ValueError("says the test")
"""


@pytest.mark.slow
def test_a_thread_that_comes_back_too_late_does_not_abort(tmp_path: Path) -> None:
    program = [sys.executable, "-c", HANGING, str(tmp_path / "root")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "ValueError: says the test" in done.stderr
