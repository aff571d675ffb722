"""Export where there is too little space: an error with the remedy, and nothing left but files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from tests.examples import some_of
from tests.unit.console import Console
from tests.unit.run.jobs import checkpointer, train
from torchrec_checknrun.errors import StorageFailed
from torchrec_checknrun.serve.copies import _Staged
from torchrec_checknrun.tools.scratch import file_tensor

ROWS, DIM = 100, 8
TABLE_BYTES = ROWS * DIM * 4


def saved(root: Path, table: str = "t") -> None:
    spec = ModelSpec((CollectionSpec("c", (TableSpec(table, ROWS, DIM, ("f0",)),)),))
    job = Job.build(spec, uniform_plan(spec, "table_wise", 1), seed=0)
    with checkpointer(root, job) as saver:
        saver.restore()
        train(job, saver)
        saver.save()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("form", "what"), some_of(product(["dcp", "safetensors"], ["scratch file", "target"]), 0, 3)
)
def test_files_may_not_be_that_large(tmp_path: Path, form: str, what: str) -> None:
    """Tell of a scratch file that has no space as of a target: never end by a signal."""
    saved(tmp_path / "run")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    most = TABLE_BYTES - (what == "scratch file")
    command = ["export", str(tmp_path / "run"), str(tmp_path / "target"), "--format", form]
    found = subprocess.run(
        [sys.executable, "-B", "-m", "torchrec_checknrun.cli", *command, "--scratch", str(scratch)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        check=False,
    )
    assert found.returncode == 2, found
    assert f"{what if what == 'scratch file' else 'writing to'} {tmp_path}" in found.stderr
    assert "a limit (ulimit -f) allows" in found.stderr
    assert list(scratch.iterdir()) == []


def test_space_is_taken_before_memory_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of a sparse file on a full disk would end the process where it is written."""
    tensor = file_tensor(tmp_path / "1", (1000, 64), torch.float32)
    assert (tmp_path / "1").stat().st_blocks * 512 >= tensor.nbytes
    assert not tensor.any()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFailed, match=r"TMPDIR.*no space is left"):
        file_tensor(tmp_path / "2", (1000, 64), torch.float32)
    replica: Any = None
    staged = _Staged(replica, most=0)  # what a follower stages beyond its memory
    rows = torch.zeros(10, 8, dtype=torch.uint8)
    with pytest.raises(StorageFailed, match="no space is left"):
        staged.put("t", torch.arange(10).numpy(), rows)
    staged.close()


def test_file_systems_that_take_no_space_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert file_tensor(tmp_path / "1", (3, 2), torch.int64).fill_(7).sum() == 42


@pytest.mark.usefixtures("one_rank")
def test_a_name_of_too_many_bytes(tmp_path: Path, console: Console) -> None:
    """Refuse before anything is written a table whose name has few letters and many bytes."""
    saved(tmp_path / "run", "字" * 90)
    target = tmp_path / "target"
    found = console.run("export", tmp_path / "run", target, "--format", "safetensors")
    assert found.code == 2
    assert "can't be a file's name: export to DCP" in found.err
    assert list(target.iterdir()) == []
