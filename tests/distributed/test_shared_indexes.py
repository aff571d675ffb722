"""The index of each file of a chain is read by one rank, and told to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed.models import Plan
from tests.distributed.small_job import Made, Workers, build, checkpointer, is_at, where
from torchrec_checknrun.format.manifest import Manifest
from torchrec_checknrun.restore import chunks
from torchrec_checknrun.root.checkpoints import read_manifest
from torchrec_checknrun.store.folder import Folder


def index_reads(root: str, spec: dict[str, Any], plan: Plan, shared: int, larger: float) -> Any:
    """Restore the newest checkpoint; return how often each rank has read each file's index."""
    folder = Folder(root)
    manifests: list[Manifest] = [
        read_manifest(folder, path.parent.name) for path in Path(root).glob("*/manifest.json")
    ]
    places = {
        (manifest.id, file.name, file.index_offset): f"{manifest.id}/{file.name}"
        for manifest in manifests
        for file in manifest.files
    }
    reads: Counter[str] = Counter()
    read_into: Callable[..., int] = Folder.read_into

    def count(self: Folder, memory: memoryview, name: str, offset: int) -> int:
        key = str(self).rpartition("/")[2], name, offset
        if key in places:
            reads[places[key]] += 1
        return read_into(self, memory, name, offset)

    job = build(spec, plan)
    with (
        mock.patch.object(chunks, "_SHARED_BYTES", shared),
        mock.patch.object(chunks, "_LARGER", larger),
        mock.patch.object(Folder, "read_into", count),
        checkpointer(root, job) as saver,
    ):
        result = saver.restore()
        assert result is not None
        assert is_at(job, root, result.id)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(reads))
    return len(places), found


@pytest.mark.parametrize("world", [2, 3])
def test_each_index_is_read_once(workers: Workers, made: Made, tmp_path: Path, world: int) -> None:
    made(tmp_path)
    files, of_ranks = workers(world).run(
        index_reads, **where(tmp_path, ranks=world), shared=1 << 20, larger=4.0
    )[0]
    assert files == 6  # of two ranks, in a chain of three
    reads = sum(map(Counter, of_ranks), Counter[str]())
    assert len(reads) == files
    assert set(reads.values()) == {1}
    assert [len(of_rank) for of_rank in of_ranks] == [3, 3, 0][:world]


@pytest.mark.parametrize(("shared", "larger"), [(0, 4.0), (1 << 20, 0.0)], ids=["many", "large"])
def test_what_is_not_told_is_read_by_all(
    workers: Workers, made: Made, tmp_path: Path, shared: int, larger: float
) -> None:
    made(tmp_path)
    files, of_ranks = workers(2).run(index_reads, **where(tmp_path), shared=shared, larger=larger)[
        0
    ]
    assert [set(of_rank.values()) for of_rank in of_ranks] == [{1}, {1}]
    assert [len(of_rank) for of_rank in of_ranks] == [files, files]
