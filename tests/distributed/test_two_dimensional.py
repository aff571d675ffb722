"""Save and restore tables that several sharding groups hold, and average from time to time."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.collisions import CollisionZoo, Spec, rows_of
from tests.distributed.small_job import Workers
from tests.distributed.two_dimensional import ROWS, AveragedJob, averaged_zoo
from tests.distributed.watch import warnings_said
from torchrec_checknrun import Checkpointer, Quantization


def shards_of(saver: Checkpointer) -> dict[str, Any]:
    """Return this rank's shards with their optimizer state, as bytes."""
    return {
        f"{shard.local} {i}": tensor.detach().numpy().tobytes().hex()
        for shard in saver._target.tracked.shards
        for i, tensor in enumerate(shard.local.tensors)
    }


def go_on(root: str, sync: bool, options: dict[str, Any]) -> list[Any]:
    """Save twice, restore in another job, train on in both; return rows at these places."""
    job, found = AveragedJob(), []
    if (method := options.pop("method", None)) is not None:
        options["quantization"] = Quantization(method=method, step=1e-6, exact_below_rows=0)
    with warnings_said() as told:
        with job.checkpointer(root, **options) as saver:
            job.train(saver, 3, sync)
            first = saver.save()
            job.train(saver, 2, sync)
            second = saver.save()
            assert first is not None
            assert second is not None
            found.append(shards_of(saver))
            job.train(saver, 2)
            found.append(shards_of(saver))
        again = AveragedJob(seed=5)
        with again.checkpointer(root, **options) as saver:
            assert saver.restore() is not None
            again.steps = saver.steps
            found.append(shards_of(saver))
            again.train(saver, 2)
            found.append(shards_of(saver))
    kinds = [first.kind, second.kind]
    rows = [first.modified_rows, second.modified_rows]
    return [found, kinds, rows, told]


@pytest.mark.parametrize("staging", ["copy_on_write", "copy"])
def test_averaged_replicas(workers: Workers, tmp_path: Path, staging: str) -> None:
    options = {"staging": staging}
    for rank, (found, kinds, rows, told) in enumerate(
        workers(4).run(go_on, root=str(tmp_path / "root"), sync=True, options=options)
    ):
        saved, trained, restored, trained_again = found
        assert len(saved) == 4 + 2 * (rank > 1)
        assert restored == saved
        assert trained_again == trained != saved
        assert kinds == ["full", "differential"]
        assert rows == [3 * ROWS, 3 * ROWS]  # each written once; an average changes all
        assert [text for text in told if "other rows" in text] == []


def test_replicas_that_were_not_averaged(workers: Workers, tmp_path: Path) -> None:
    """Store the lowest rank's rows, and say so."""
    results = workers(4).run(go_on, root=str(tmp_path / "root"), sync=False, options={})
    before = [found[0] for found, *_ in results]
    for rank, (found, _, rows, told) in enumerate(results):
        saved, _, restored, _ = found
        of_tables = {name: value for name, value in saved.items() if "t2" not in name}
        assert restored == before[rank - rank % 2]  # groups are of ranks 0 and 2, 1 and 3
        assert (restored == saved) == (rank % 2 == 0)
        assert len(of_tables) == (2 if rank < 2 else 4)
        assert rows[0] == 3 * ROWS
        assert rows[1] < 3 * ROWS
        texts = [text for text in told if "other rows" in text]
        if rank:
            assert texts == []
            continue
        (text,) = texts
        assert (
            "the replicas of bags.embedding_bags.t0[0:20, 0:8], bags.embedding_bags.t0[20" in text
        )
        assert "on ranks 1, 3 than on lower ones" in text
        assert "sync()" in text


def test_differences_are_not_for_averaged_tables(workers: Workers, tmp_path: Path) -> None:
    results = workers(4).run(
        go_on, root=str(tmp_path / "root"), sync=True, options={"method": "delta"}
    )
    for rank, (found, *_, told) in enumerate(results):
        saved, _, restored, _ = found
        assert restored.keys() == saved.keys()
        texts = [text for text in told if "fisher" in text]
        assert len(texts) == 2 * (rank == 0)  # of each Checkpointer
        assert all("bags.embedding_bags.t0, bags.embedding_bags.t1: several" in t for t in texts)


def mapped(zoo: CollisionZoo, saver: Checkpointer) -> dict[str, Any]:
    maps = {table: sorted(rows_of(module).items()) for table, module in zoo.modules.items()}
    return {"rows": shards_of(saver), "maps": maps, "history": zoo.history()}


def save_maps(root: str) -> list[Any]:
    zoo = averaged_zoo(Spec())
    with warnings_said() as told, Checkpointer(root, model=zoo.model) as saver:
        for _ in range(4):  # ids are evicted every third step
            zoo.train()
            saver.step()
        saver.save()
        saved = mapped(zoo, saver)
    zoo = averaged_zoo(Spec(), seed=7)
    with Checkpointer(root, model=zoo.model) as saver:
        assert saver.restore() is not None
        return [saved, mapped(zoo, saver), told]


@pytest.mark.skipif(
    version("torchrec").startswith(("1.4.", "1.5.", "1.6.")),
    reason="TorchRec before 1.7 can't shard managed collisions in groups of ranks",
)
def test_maps_of_averaged_tables(workers: Workers, tmp_path: Path) -> None:
    """Store one group's maps with its rows and its ids since the last eviction, for all groups."""
    results = workers(4).run(save_maps, root=str(tmp_path / "root"))
    for rank, (saved, restored, told) in enumerate(results):
        assert restored == results[rank - rank % 2][0]
        assert (restored == saved) == (rank % 2 == 0)
        assert all(history["seen"] for history in restored["history"].values())
        texts = [text for text in told if "other rows" in text]
        assert ["_managed_collision_modules.t0._mch_counts[0:24]" in text for text in texts] == [
            True
        ] * (rank == 0)
