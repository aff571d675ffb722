"""Run the figure of partial recovery at a small size: emulations, lost shards, kept seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from recipes.figures import lost_shards, partial_recovery, plots
from recipes.figures.lost_shards import SCHEMES, Change, Plan, Saved
from recipes.figures.partial_recovery import Runs, judge, overheads, stale
from recipes.figures.small_job import SmallJob, small_job
from tests.examples import some_of

REPOSITORY = Path(__file__).parents[3]
RESULT = REPOSITORY / "recipes" / "results" / "partial_recovery.json"
PAGE = REPOSITORY / "docs" / "explanation" / "what_failures_cost.md"
PLAN = Plan(
    steps=6,
    failure=4,
    priority_every=2,
    fraction=0.01,
    lost=((1,), (0, 2)),
    ranks=4,
    batch=128,
    scale=0.0002,
    eval_samples=512,
)


@pytest.fixture
def job() -> Iterator[SmallJob]:
    with small_job(["model.scale=0.0002", "trainer.batch_size=128"]) as made:
        yield made


def test_emulations_of_long_jobs_are_the_closed_forms() -> None:
    """Play enough jobs that chance stays below half of what is allowed."""
    rows, lost = overheads(Runs(short=20, long=60)), stale(Runs(short=20, long=300))
    assert [(row["recovery"], row["process_deaths"]) for row in rows] == [
        ("full", 0.0),
        ("naive partial", 0.0),
        ("partial", 0.0),
        ("images, else full", 0.5),
        ("images, else partial", 0.5),
        ("images, else full", 0.9),
        ("images, else partial", 0.9),
        ("images, else full", 1.0),
    ]
    assert all(row["long"]["overhead_error"] < 0.015 * row["overhead"] for row in rows)
    assert all(2 * row["long"]["pls_error"] < 0.02 * row["pls"] for row in lost)
    assert judge(rows, lost) == []
    full, naive, cpr = (row["long"]["overhead"] for row in rows[:3])
    assert 0.082 < full < 0.086
    assert naive < 0.55 * full
    assert 0.0048 < cpr < 0.0068
    only_processes = rows[-1]
    assert only_processes["lost"] == only_processes["long"]["lost"] == 0
    assert only_processes["pls"] == only_processes["long"]["pls"] == 0
    assert only_processes["overhead"] - only_processes["journal"] < 0.0046


def test_an_emulation_beside_the_closed_form_is_named() -> None:
    row = {"recovery": "full", "overhead": 0.1}
    lost = {"budget": 0.05, "pls": 0.05}
    fine = judge([{**row, "long": {"overhead": 0.1049}}], [{**lost, "long": {"pls": 0.05 * 1.029}}])
    assert fine == []
    wrong = judge(
        [{**row, "long": {"overhead": 0.0949}}], [{**lost, "long": {"pls": 0.05 * 0.969}}]
    )
    assert wrong == [
        "full: overhead -5.1% of the closed form",
        "budget 0.05: PLS -3.1% of the formula",
    ]


@pytest.mark.parametrize("name", some_of(SCHEMES, 0, 2, 5))
def test_only_lost_ranks_go_back(job: SmallJob, name: str) -> None:
    saved = Saved(name, job.shards, PLAN, seed=0)
    start = [tensor.clone() for shard in job.shards for tensor in shard.tensors]
    features = [shard.table.rpartition(".t_")[2] for shard in job.shards]
    (batch,) = job.batches(1)
    job.train([batch])
    saved.note([batch.sparse_features[feature].values() for feature in features])
    now = [tensor.clone() for shard in job.shards for tensor in shard.tensors]
    saved.save()
    saved.bring_back((1, 3), ranks=4)
    by_size = sorted(range(26), key=lambda at: -len(job.shards[at].weight))
    kept, gone = [], 0
    tensors = [tensor for shard in job.shards for tensor in shard.tensors]
    each = [at for at, shard in enumerate(job.shards) for _ in shard.tensors]
    for at, tensor, was, newest in zip(each, tensors, start, now, strict=True):
        count = len(tensor)
        lost = torch.zeros(count, dtype=torch.bool)
        for rank in (1, 3):
            lost[rank * count // 4 : (rank + 1) * count // 4] = True
        assert torch.equal(tensor[~lost], newest[~lost])
        if name == "nothing":
            assert torch.equal(tensor[lost], was[lost])
        elif at not in by_size[:7]:  # small tables are saved whole
            assert torch.equal(tensor[lost], newest[lost])
        elif tensor.dim() == 2:
            same = (tensor == newest).all(1)
            back = (tensor == was).all(1)
            assert (same | back)[lost].all()
            changed = lost & (newest != was).any(1)
            kept.append(int((changed & same).sum()))
            assert kept[-1] <= max(1, int(PLAN.fraction * count))
            gone += int((changed & back).sum())
    if name != "nothing":
        assert gone > 0  # more rows change than are saved
    if name not in ("nothing", "random rows"):
        assert sum(kept) > 0


def test_every_scheme_and_loss_is_measured() -> None:
    with tqdm(total=PLAN.trained, disable=True) as bar:
        changes = lost_shards.measure(PLAN, 3, bar)
        assert bar.n == 0  # disabled bars don't count
    expected = [("noise", 0)]
    expected += [(name, len(lost)) for lost in PLAN.lost for name in SCHEMES]
    assert [(change.scheme, change.lost) for change in changes] == expected
    assert {change.seed for change in changes} == {3}
    assert {change.pls for change in changes} == {0.0, 4 / 24, 8 / 24}
    by = {(change.scheme, change.lost): abs(change.logloss) for change in changes}
    assert by["noise", 0] < by["nothing", 2] / 10
    rows = lost_shards.summary([*changes, *(replace(c, seed=4, logloss=0.0) for c in changes)])
    assert [(row["scheme"], row["lost"]) for row in rows] == expected
    first = rows[1]
    assert first["seeds"] == 2
    assert first["logloss"] == pytest.approx(changes[1].logloss / 2)
    assert first["logloss_error"] == pytest.approx(abs(changes[1].logloss) / 2)
    assert lost_shards.summary(changes)[1]["logloss_error"] is None


def test_seeds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run goes on with the seeds that are missing; another plan starts over."""
    trained: list[int] = []
    fails = [2]

    def measure(plan: Plan, seed: int, bar: Any) -> list[Change]:
        if seed in fails:
            fails.remove(seed)
            raise OSError("the machine goes down")
        trained.append(seed)
        return [Change(seed, "nothing", 1, 0.1, float(seed), 0.0)]

    monkeypatch.setattr(lost_shards, "measure", measure)
    path = tmp_path / "partial_recovery.json"
    with pytest.raises(OSError, match="goes down"):
        partial_recovery.accuracy(PLAN, 3, {"other": 1}, path)
    known = json.loads(path.read_text())
    assert known["other"] == 1
    found = partial_recovery.accuracy(PLAN, 3, known, path)
    assert trained == [0, 1, 2]
    assert [row["logloss"] for row in found["summary"]] == [1.0]
    fewer = partial_recovery.accuracy(PLAN, 2, json.loads(path.read_text()), path)
    assert fewer["summary"][0]["seeds"] == 2
    partial_recovery.accuracy(replace(PLAN, batch=64), 1, known, path)
    assert trained == [0, 1, 2, 0]


def test_the_committed_result_is_what_the_page_says() -> None:
    """Compare its tables cell by cell, and hold the claims that they make."""
    numbers = json.loads(RESULT.read_text())
    page = PAGE.read_text()
    assert judge(numbers["overhead"], numbers["pls"]) == []
    for row in numbers["overhead"]:
        cells = [f"{100 * row['overhead']:.2f}"]
        for name in ("emulated", "long"):
            emulated = row[name]["overhead"]
            cells.append(f"{100 * emulated:.2f} ({emulated / row['overhead'] - 1:+.1%})")
        assert f"| {' | '.join(cells)} |" in page
    for row in numbers["pls"]:
        emulated = row["long"]["pls"]
        cell = f"{emulated:.4f} ({emulated / row['pls'] - 1:+.1%})"
        assert (
            f"| {row['budget']} | {row['interval_hours']:.1f} h | {row['pls']:.4f} | {cell} |"
            in page
        )
    found = {(row["scheme"], row["lost"]): row for row in numbers["accuracy"]["summary"]}
    for scheme in SCHEMES:
        cells = [
            f"{100 * found[scheme, lost][x]:+.4f} ± {100 * found[scheme, lost][f'{x}_error']:.4f}"
            for lost in (1, 4)
            for x in ("logloss", "auc")
        ]
        assert f"| {' | '.join(cells)} |" in page
        if scheme not in ("nothing", "random rows"):
            change = found[scheme, 4]
            assert change["seeds"] >= 5
            assert change["logloss"] < found["nothing", 4]["logloss"] / 4
            assert change["logloss"] < found["random rows", 4]["logloss"]


def test_the_command_writes_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    plots.require_matplotlib()
    monkeypatch.setattr(partial_recovery, "QUICK", Runs(short=2, long=10))
    monkeypatch.setattr(lost_shards, "QUICK", PLAN)
    arguments = ["", "--quick", "--out", str(tmp_path), "--seeds", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--part", "accuracy"])
    assert partial_recovery.main() == 0
    assert "Adagrad growth" in capsys.readouterr().out
    assert (tmp_path / "partial_recovery_accuracy.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", [*arguments, "--part", "overhead"])
    ended = partial_recovery.main()
    printed = capsys.readouterr().out
    assert "naive partial" in printed
    numbers = json.loads((tmp_path / "partial_recovery.json").read_text())
    assert ended == bool(judge(numbers["overhead"], numbers["pls"]))
    assert len(numbers["accuracy"]["changes"]) == 1 + 2 * len(SCHEMES)  # still there
    assert (tmp_path / "partial_recovery.png").read_bytes().startswith(b"\x89PNG")
