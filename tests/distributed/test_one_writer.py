"""One root has one writer; a saved step is saved once; old checkpoints go; file systems lag."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist

from tests.distributed.background_jobs import build, checkpointer, differences, ids, where
from tests.distributed.models import Plan
from tests.distributed.states import gather, local_bytes
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Full, Retention
from torchrec_checknrun.errors import RootInUse, StorageUnreachable
from torchrec_checknrun.format.names import checkpoint_id
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.writers.lease import FOLDER, Claim, Holder, latest_claim

Workers = Callable[[int], WorkerPool]


def elsewhere() -> Any:
    """Make this process look like one of another machine."""
    other = msgspec.structs.replace(
        Holder.this_process(), machine="another", host="far", pid=7, run="another"
    )
    return mock.patch.object(Holder, "this_process", classmethod(lambda cls: other))


def two_trainers(root: str, plan: Plan) -> list[str]:
    """Refuse the second writer at its first step, the first one at its commit once replaced.

    Return what this rank hears.
    """
    heard = []
    job = build(plan)
    with checkpointer(root, job) as first:
        job.train()
        first.step()
        first.save()
        saved = ids(root)
        with elsewhere(), checkpointer(root, job) as second:
            for act in (second.step, second.save):
                with pytest.raises(RootInUse) as refused:
                    act()
                heard.append(str(refused.value))
        claim = latest_claim(Folder(root))
        assert claim is not None
        dist.barrier()
        if dist.get_rank() == 0:
            with elsewhere():
                later = Claim(claim.epoch + 1, Holder.this_process(), earlier=tuple(saved))
            (Folder(root) / FOLDER).put(later.name, later.to_bytes())
        dist.barrier()
        job.train()
        first.steps += 1
        with pytest.raises(RootInUse) as refused:
            first.save()
        heard.append(str(refused.value))
        assert ids(root) == saved
    return heard


def test_two_trainers(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(two_trainers, **where(tmp_path))
    assert zero == one
    for text in zero[:2]:
        assert "is written to by process" in text
        assert "give this run a root of its own" in text
    assert "was taken over by process 7 on far" in zero[2]


def restarts(root: str, plan: Plan) -> list[Any]:
    """Skip the save of a committed step, unless something has changed or is damaged."""
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        first = saver.save()
        assert saver.save() == replace(first, unchanged=True)
        saver.mark(next(iter(saver._target.tracked.tables)), [1])
        again = saver.save()
        assert not again.unchanged
    with checkpointer(root, job) as saver:
        assert saver.restore() is not None
        same = saver.save()
        assert (same.id, same.unchanged) == (again.id, True)
        assert len(ids(root)) == 2
        dist.barrier()
        if dist.get_rank() == 0:
            next(Path(root, again.parent or "").glob("rank-*")).unlink()
        dist.barrier()
        whole = saver.save()
        assert whole is not None
        problems = differences(saver, job, gather(job))
    return [again.kind, again.modified_rows, whole.kind, whole.chain_length, problems]


def test_a_step_that_is_committed(workers: Workers, tmp_path: Path) -> None:
    for result in workers(2).run(restarts, **where(tmp_path)):
        assert result == ["differential", 1, "full", 1, []]


def keeps(root: str, plan: Plan) -> list[Any]:
    """Keep two restore points, and the one resumed from while there is no newer one.

    What crashed saves have left goes, what is being written stays.
    """
    job = build(plan)
    found: list[Any] = []
    with checkpointer(root, job, policy=Full(), retention=Retention(2)) as saver:
        for number in range(4):
            if number == 2 and dist.get_rank() == 0:
                (Path(root) / checkpoint_id(2, 1, "0123abcd")).mkdir()
            job.train()
            saver.step()
            assert saver.save() is not None
        wanted = gather(job)
        job.train()
    dist.barrier()
    found.append([int(id[4:10]) for id in ids(root)])
    with checkpointer(root, job, policy=Full(), retention=Retention(1)) as saver:
        first = ids(root)[0]
        report = saver.restore(first)
        assert report is not None
        for _ in range(2):
            job.train()
            saver.step()
            saver.save()
    dist.barrier()
    found.append([int(id[4:10]) for id in ids(root)])
    found.append(sorted(path.name[:10] for path in Path(root).iterdir()))
    assert wanted
    return found


def test_old_checkpoints_go(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(keeps, **where(tmp_path))
    assert zero == one
    # The older of the two was resumed from: the other one is a fork now.
    assert zero == [[3, 4], [3, 6], ["seq-000003", "seq-000006", "writers"]]


def sees_files_late(root: str, plan: Plan) -> list[str]:
    """Show rank 1 what rank 0 has seen only a little later, and not all of it."""
    job = build(plan)
    with checkpointer(root, job) as saver:
        job.train()
        saver.step()
        saver.save()
        job.train()
        saver.step()
        saver.save()
        wanted = gather(job)
        seen: dict[tuple[str, int], int] = {}
        read_into = Folder.read_into

        def late(folder: Folder, memory: memoryview, name: str, offset: int) -> int:
            key = f"{folder}/{name}", offset
            seen[key] = seen.get(key, 0) + 1
            if dist.get_rank() == 1 and seen[key] == 1:
                raise FileNotFoundError(name)
            if dist.get_rank() == 1 and seen[key] == 2:
                return len(memory) // 2
            return read_into(folder, memory, name, offset)

        with mock.patch.object(Folder, "read_into", late):
            problems = differences(saver, job, wanted)
        assert dist.get_rank() == 0 or max(seen.values()) >= 3
    return problems


def test_views_that_differ_for_a_while(workers: Workers, tmp_path: Path) -> None:
    assert workers(2).run(sees_files_late, **where(tmp_path)) == [[], []]


def storage_is_away(root: str, plan: Plan) -> list[str]:
    """Raise if the storage doesn't answer: a restore doesn't take that for damage."""
    job = build(plan)
    heard = []
    with checkpointer(root, job, policy=Full()) as saver:
        for _ in range(2):
            job.train()
            saver.step()
            saver.save()
        before = local_bytes(job)

        def away(name: str, rank: int) -> Any:
            real = getattr(Folder, name)

            def act(folder: Folder, *args: Any) -> Any:
                if "seq-000002" in str(folder) and dist.get_rank() == rank:
                    raise StorageUnreachable(110, f"reading {folder}: it didn't answer")
                return real(folder, *args)

            return mock.patch.object(Folder, name, act)

        for name, rank in (("read", 0), ("read_into", 1)):  # the manifest; an index
            with away(name, rank), pytest.raises(StorageUnreachable) as refused:
                saver.restore()
            heard.append(str(refused.value))
        assert local_bytes(job) == before
        report = saver.restore()
        assert report is not None
        assert report.sequence == 2
    return heard


def test_storage_that_is_away_is_not_damaged(workers: Workers, tmp_path: Path) -> None:
    zero, one = workers(2).run(storage_is_away, **where(tmp_path))
    assert zero == one
    assert all("didn't answer" in text for text in zero)


def on_s3(root: str, plan: Plan, environment: dict[str, str]) -> list[Any]:
    """Save, resume and prune in a bucket."""
    import s3fs

    with mock.patch.dict(os.environ, environment):
        s3fs.S3FileSystem.clear_instance_cache()
        job = build(plan)
        options: dict[str, Any] = {"retention": Retention(1)}
        with checkpointer(root, job, background="process", **options) as saver:
            for _ in range(3):
                job.train()
                saver.step()
                assert saver.save() is not None
            problems = differences(saver, job, gather(job))
            job.train()
        with checkpointer(root, job, policy=Full(), **options) as saver:
            report = saver.restore()
            assert report is not None
            job.train()
            saver.step()
            saver.save()
        dist.barrier()
        left = [name for name in Folder(root).names() if name != FOLDER]
    return [problems, len(report.chain), len(left)]
