"""Tables stored as differences on several ranks: 4, then 2, then 3, and other plans in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.layouts import build
from tests.distributed.test_layouts import NAMES, SPEC, layout
from tests.distributed.worker_pool import WorkerPool
from tests.examples import ALL, some_of
from tests.unit.run.deltas import delta, lc, pieces, state_pieces
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.compaction.compact import compact
from torchrec_checknrun.dcp import LoadPlanner, StorageReader
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.format.names import parse_id
from torchrec_checknrun.root.checkpoints import committed
from torchrec_checknrun.save import background
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.tracking import TrackedModel, track

Workers = Callable[[int], WorkerPool]


METHODS = {"delta": delta(), "logdelta": delta(optimizer="logdelta"), "lc": lc(2)}


def saving(root: str, job: Any, method: str = "delta", **options: Any) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer},
        quantization=METHODS[method],
        chunk_bytes=1500,
        **options,
    )


def keep(saver: Checkpointer, path: str) -> None:
    """Store what this rank's rows must restore to, and their state stored as differences."""
    found = {}
    for shard in saver._target.tracked.shards:
        for place, values in pieces(saver, shard):
            where = [place.row_start, place.row_stop, place.col_start, place.col_stop]
            found["|".join([shard.table, *map(str, where)])] = values
        for place, state, sums in state_pieces(saver, shard):
            where = [place.row_start, place.row_stop, place.col_start, place.col_stop]
            columns = place.col_stop - place.col_start
            values = np.repeat(sums[:, None], columns, axis=1)
            found["|".join([f"{shard.table}/{state}", *map(str, where)])] = values
    np.savez(f"{path}-{dist.get_rank()}.npz", **found)  # type: ignore[arg-type]  # names are text


def wholes(path: str) -> dict[str, np.ndarray]:
    """Put the tables together that all ranks of a life have kept; row-wise state by columns."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(Path(path).parent.glob(f"{Path(path).name}-*.npz")):
        with np.load(file) as parts:
            for name, values in parts.items():
                table, *where = name.split("|")
                top, bottom, left, right = map(int, where)
                path_of = table.partition("/")[0]
                shape = next(t for n, t in SPEC.table_paths.items() if n == path_of)
                whole = found.setdefault(
                    table, np.full((shape.rows, shape.dim), np.nan, np.float32)
                )
                whole[top:bottom, left:right] = values
    return found


def life(
    root: str,
    target: dict[str, Any],
    kept: str | None,
    into: str,
    saves: int,
    fail: bool,
    method: str = "delta",
) -> list[str]:
    """Restore what another life has kept, save links with failures between them, keep the last.

    Returns:
        Kinds of the checkpoints.
    """
    job = build(SPEC.to_json(), target, seed=77)
    kinds = []
    with saving(root, job, method) as saver:
        assert (saver.restore() is None) == (kept is None)
        if kept is not None:
            compare_with(kept, saver._target.tracked)
        for number in range(saves):
            job.train(1)
            saver.step()
            if fail and number:
                one_rank_fails(saver)
                job.train(1)
                saver.step()
            kinds.append(saver.save().kind)
        keep(saver, into)
    return kinds


def one_rank_fails(saver: Checkpointer) -> None:
    """Save while one rank can't write, after it has encoded its rows."""
    write = background.write_rank_file

    def failing(*arguments: Any) -> Any:
        summary = write(*arguments)
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(28, "no space left, says the test")
        return summary

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "write_rank_file", failing)
        with pytest.raises(SaveFailed):
            saver.save()


def load_through_dcp(root: str, target: dict[str, Any], kept: str) -> None:
    """Load what a life has kept by ``dcp.load``."""
    job = build(SPEC.to_json(), target, seed=78)
    newest = committed(Folder(root))[0]
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    tracked = track(job.model)
    dcp.load(state, planner=LoadPlanner(tracked), storage_reader=StorageReader(f"{root}/{newest}"))
    compare_with(kept, tracked)
    tracked.close()


def compare_with(kept: str, tracked: TrackedModel) -> None:
    """Compare this rank's rows with those that a life has kept."""
    wanted = wholes(kept)
    for shard in tracked.shards:
        place = shard.rectangle
        part = wanted[shard.table][
            place.row_start : place.row_stop, place.col_start : place.col_stop
        ]
        found = shard.local.weight.detach().numpy()
        assert found.tobytes() == np.ascontiguousarray(part).tobytes(), shard.local.name
        for name, state in shard.local.optimizer.items():
            if (kept_state := wanted.get(f"{shard.table}/{name}")) is not None:
                rows = kept_state[place.row_start : place.row_stop]
                mean = rows[:, place.col_start : place.col_stop].astype(np.float64).mean(axis=1)
                assert np.allclose(state.detach().numpy(), mean, rtol=1e-6, atol=0)


def lives(
    workers: Workers, folder: Path, plan: list[tuple[str, int]], fail: bool, method: str = "delta"
) -> None:
    root, kept = str(folder / "run"), None
    for number, (kind, ranks) in enumerate(plan):
        into = str(folder / f"kept{number}")
        place = asdict(layout(kind, ranks))
        arguments: dict[str, Any] = {"root": root, "target": place, "kept": kept}
        arguments |= {"into": into, "saves": 3 if ALL else 2, "fail": fail, "method": method}
        kinds = workers(ranks).run(life, **arguments, timeout=240.0)
        assert kinds[0].count("differential") >= 1, kinds
        (folder / f"kinds{number}").write_text(json.dumps(kinds))
        kept = into
        if number == 1:
            compact(root)
    if plan[-1] == ("row_wise", 3):
        workers(3).run(load_through_dcp, root=root, target=place, kept=kept)
    assert [problem for found in verify(root) for problem in found.problems] == []


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([("row_wise", 4), ("row_wise", 2), ("row_wise", 3)], marks=pytest.mark.slow),
        [("column_4", 4), ("table_wise", 2), ("column_2", 3)],
        pytest.param([("mixed", 2), ("data_parallel", 2), ("mixed", 4)], marks=pytest.mark.slow),
        pytest.param([("grid", 4), ("table_row_wise", 2), ("row_wise", 3)], marks=pytest.mark.slow),
    ],
    ids=lambda plan: " ".join(f"{kind}:{ranks}" for kind, ranks in plan),
)
@pytest.mark.parametrize("method", some_of(["delta", "logdelta"], 1))
def test_any_ranks_and_columns(
    workers: Workers, tmp_path: Path, plan: list[tuple[str, int]], method: str
) -> None:
    assert len(NAMES) == len(SPEC.table_paths)
    lives(workers, tmp_path, plan, fail=False, method=method)


@pytest.mark.parametrize(
    "plan",
    [
        [("row_wise", 2), ("row_wise", 3)],
        pytest.param([("row_wise", 4), ("row_wise", 2), ("row_wise", 3)], marks=pytest.mark.slow),
        pytest.param([("column_4", 4), ("mixed", 2), ("column_2", 3)], marks=pytest.mark.slow),
    ],
    ids=lambda plan: " ".join(f"{kind}:{ranks}" for kind, ranks in plan),
)
def test_lc_on_any_ranks_and_columns(
    workers: Workers, tmp_path: Path, plan: list[tuple[str, int]]
) -> None:
    """Ranks fail between links; the chain is compacted after the second life."""
    lives(workers, tmp_path, plan, fail=True, method="lc")


@pytest.mark.parametrize("method", some_of(["delta", "logdelta"], 1))
def test_a_rank_fails_between_links(workers: Workers, tmp_path: Path, method: str) -> None:
    plan = [("row_wise", 2), ("mixed", 2), ("row_wise", 3)]
    lives(workers, tmp_path, plan, fail=True, method=method)


def unknown_outcome(root: str, target: dict[str, Any], into: str) -> list[str]:
    """Let one rank hear of a failure though rank 0 has committed, then the other way round."""
    job = build(SPEC.to_json(), target, seed=77)
    kinds = []
    with saving(root, job) as saver:
        for number in range(5):
            job.train(1)
            saver.step()
            saver.save(wait=False)
            running = saver._saver.running
            assert running is not None
            running.known.wait()
            if number in (2, 3) and dist.get_rank() == number - 2:
                running._error, running._manifest = SaveFailed("says the test"), None
            try:
                report = saver.wait()
            except SaveFailed:
                kinds.append("unknown")
            else:
                assert report is not None
                kinds.append(report.kind)
        keep(saver, into)
    return kinds


def test_ranks_that_disagree_on_a_commit_begin_a_base(workers: Workers, tmp_path: Path) -> None:
    """A chain goes on only from a checkpoint that all ranks know."""
    target, into = asdict(layout("row_wise", 2)), str(tmp_path / "kept")
    kinds = workers(2).run(unknown_outcome, root=str(tmp_path / "run"), target=target, into=into)
    assert kinds == [
        ["full", "differential", "unknown", "full", "full"],
        ["full", "differential", "differential", "unknown", "full"],
    ]
    arguments: dict[str, Any] = {"root": str(tmp_path / "run"), "target": target, "kept": into}
    workers(2).run(life, **arguments, into=str(tmp_path / "last"), saves=1, fail=False)


def goes_on(root: str, target: dict[str, Any], into: str) -> list[str | None]:
    """Save links while chains are compacted, now and then waiting for the copy; return parents."""
    job, parents = build(SPEC.to_json(), target, seed=77), []
    with saving(root, job, compact_after=1) as saver:
        for number in range(6 if ALL else 3):  # each copy is made by a process of its own
            job.train(1)
            saver.step()
            parents.append(saver.save().parent)
            if number % 3 == 1:
                done = [saver._saver.going_on.wait(120)]
                dist.broadcast_object_list(done)
                assert done[0]
        keep(saver, into)
    return parents


@pytest.mark.parametrize("kind", [pytest.param("row_wise", marks=pytest.mark.slow), "mixed"])
def test_ranks_go_on_from_a_copy(workers: Workers, tmp_path: Path, kind: str) -> None:
    """No rank takes the copy for anything but the last link's equal."""
    root, into = str(tmp_path / "run"), str(tmp_path / "kept")
    target = asdict(layout(kind, 2))
    parents = workers(2).run(goes_on, root=root, target=target, into=into, timeout=240.0)
    assert parents[0] == parents[1]
    ids = [parse_id(parent) for parent in parents[0] if parent is not None]
    assert any(id is not None and id.is_copy for id in ids), parents[0]
    assert [problem for found in verify(root) for problem in found.problems] == []
    arguments: dict[str, Any] = {"root": root, "target": target, "kept": into}
    workers(2).run(life, **arguments, into=str(tmp_path / "last"), saves=1, fail=False)
