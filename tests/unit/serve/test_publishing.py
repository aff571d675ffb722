"""A Checkpointer publishes between checkpoints, and a follower of the publications has its rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.serve.served import Job, Net, differences, every_row, kernel_bytes, quantized
from torchrec_checknrun import Checkpointer, Follower, Publish
from torchrec_checknrun.errors import UnsupportedState, UnsupportedTable
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.run.publisher import CheapChain
from torchrec_checknrun.store.folder import Folder

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(name="roots")
def _roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "run", tmp_path / "serve"


def publishing(
    roots: tuple[Path, Path], sharding: str = "row_wise", rows: int = 40, **publish: Any
) -> Job:
    """Make a job that publishes when told to."""
    options = {"every_seconds": 1e6, **publish}
    return Job(roots[0], sharding, rows, publish=Publish(roots[1], **options))


def plain(job: Job) -> Net:
    """Copy the model as it is now into one that is not sharded."""
    found = Net(rows=job.rows)
    with torch.no_grad():
        for name, value in job.model.state_dict().items():
            into = found.state_dict()[name]
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            if shards is None:
                into.copy_(value)
                continue
            for shard in shards:
                (row, col), part = shard.metadata.shard_offsets, shard.tensor
                into[row : row + part.shape[0], col : col + part.shape[1]] = part
    return found.eval()


def manifests(root: Path) -> list[Manifest]:
    folder = Folder(root)
    return [read_manifest(folder, name) for name in sorted(folder.names()) if name[0] in "s0123456789c"]


@pytest.mark.parametrize("bits", [32, 4, 2])
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_a_follower_has_the_rows_of_training(
    roots: tuple[Path, Path], bits: int, sharding: str
) -> None:
    if sharding == "column_wise" and bits != 32:
        pytest.skip("a quantized row has a scale for each of its column ranges")
    rows = 1100 if bits < 32 else 40  # of smaller tables rows are published as they are
    job = publishing(roots, sharding, rows, bits=bits)
    follower = Follower(roots[1], quantized(Net(rows=rows), 8 if bits == 32 else bits))
    for seed in range(4):
        job.train(seed)
        report = job.saver.publish()
        assert report is not None
        assert report.kind == ("full" if seed == 0 else "differential")
        if seed == 1:
            job.save()  # of another root, which takes the checkpoints' marks and no others
        version = follower.poll()
        assert version is not None
        assert (version.step, version.whole) == (seed + 1, seed == 0)
        if seed:
            assert 0 < version.rows_applied < 4 * rows
        wanted = quantized(plain(job), 8 if bits == 32 else bits)
        with follower.read() as (model, _):
            pairs = zip(kernel_bytes(model), kernel_bytes(wanted), strict=True)
            assert all(torch.equal(own, other) for own, other in pairs)
            assert torch.equal(model.over.weight, wanted.over.weight)
            assert torch.equal(model.seen, wanted.seen)
    job.saver.close()
