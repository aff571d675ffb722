"""Import in the write process what its parent does, from nowhere else; never outlive the parent."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

import torchrec_checknrun
from recipes.dlrm_criteo.job import is_alive
from tests.examples import some_of
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save.isolated_start import import_path

PACKAGE = Path(torchrec_checknrun.__file__).parent
PLANTED = (
    *("json", "torch", "numpy", "site", "sitecustomize", "usercustomize", "ctypes", "signal"),
    *("importlib", "xxhash", "fsspec", "multiprocessing", "torchrec_checknrun", "encodings"),
)
SCRIPT = """
import sys, time
from pathlib import Path
from torchrec_checknrun.snapshot.memory import StagingMemory
from torchrec_checknrun.save.process import WriteProcess
for name in {planted!r}:  # only now: the parent has its own
    Path("{{}}.py".format(name)).write_text("open('ran-{{}}'.format(__name__), 'w')")
memory = StagingMemory(1 << 20, shared=True)
process = WriteProcess(memory)
assert process._connection.poll(100), "it has not started"
print(process._connection.recv(), process.alive)
process.close()
"""


@pytest.mark.parametrize("how", some_of(["script", "module", "command", "standard input"], 0))
def test_planted_modules_do_not_run(tmp_path: Path, how: str) -> None:
    source = SCRIPT.format(planted=PLANTED)
    (tmp_path / "train.py").write_text(source)
    arguments = {
        "script": [str(tmp_path / "train.py")],
        "module": ["-m", "train"],
        "command": ["-c", source],
        "standard input": ["-"],
    }
    done = subprocess.run(
        [sys.executable, *arguments[how]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        input=source if how == "standard input" else None,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "ready True\n", done.stderr
    assert [path.name for path in tmp_path.glob("ran-*")] == []


def test_what_is_looked_for_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), "/a", "relative", "/b"])
    assert import_path() == ["/a", "/b", str(tmp_path)]


@pytest.mark.parametrize("how", ["not executable", "missing", "embedded"])
def test_an_interpreter_that_cannot_be_started_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    interpreter = tmp_path / "python"
    if how == "not executable":
        interpreter.write_bytes(b"")
    monkeypatch.setattr(sys, "executable", None if how == "embedded" else str(interpreter))
    named = "''" if how == "embedded" else repr(str(interpreter))
    with pytest.raises(SaveFailed, match=f"{re.escape(named)}.*background='thread'"):
        Checkpointer(tmp_path / "run", model=nn.Linear(2, 2), background="process")


PARENT = """
import sys, types
from importlib.util import module_from_spec, spec_from_file_location
package = types.ModuleType("torchrec_checknrun")
package.__file__, package.__path__ = {init!r}, [{folder!r}]
sys.modules["torchrec_checknrun"] = package
from torchrec_checknrun.save.isolated_start import start
print("here", flush=True)
while True:
    process = start("torchrec_checknrun.save.process", 0, 1)
    print(process.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs parent-death signals")
def test_it_ends_with_its_parent_at_any_moment(tmp_path: Path) -> None:
    """Kill the parent within the first half of a second, while the process starts."""
    moments = random.Random(0)
    source = PARENT.format(init=str(PACKAGE / "__init__.py"), folder=str(PACKAGE))
    for _ in range(12):
        parent = subprocess.Popen(
            [sys.executable, "-I", "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == "here\n"
        child = int(parent.stdout.readline())
        time.sleep(moments.choice([0, 0.001, 0.01, 0.05, 0.2, 0.5]) * moments.random())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 30
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not is_alive(child)
