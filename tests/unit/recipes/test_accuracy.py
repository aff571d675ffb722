"""Run the figure of restores at a tiny size: pairs match, fewer bits lose more, bytes add up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from recipes.dlrm_criteo.samples import Samples
from recipes.figures import plots
from recipes.figures.accuracy import __main__ as command
from recipes.figures.accuracy import branches, methods, tasks
from recipes.figures.accuracy.branches import Accesses, Change, Stored, measure
from recipes.figures.accuracy.methods import METHODS, methods_of
from recipes.figures.accuracy.scale import FOLDER, Scale
from recipes.figures.accuracy.summary import Effect, Interval, Size, effects, sizes, smallest
from recipes.figures.accuracy.tasks import TASKS, Sources
from recipes.figures.small_job import SmallJob
from tests.examples import some_of
from tests.unit.recipes.test_movielens import GROUPLENS

SCALE = Scale(
    first=4,
    every=2,
    points=2,
    restores=(1, 2),
    gap=4,
    saves=2,
    after=3,
    eval_samples=512,
    rated_batch=64,
    synthetic_ratings=3000,
    methods=("noise*", "exact", "adaptive [24] bit", "importance 4 bit"),
    dlrm=("model.scale=0.0002", "trainer.batch_size=128"),
)
MOMENTS = [(1, 0), (2, 0), (2, 3)]


@pytest.fixture(params=some_of(["dlrm16", "dlrm64", "mf", "deepfm"], 2))
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(task: str) -> Iterator[SmallJob]:
    with TASKS[task].job(SCALE, Sources()) as made:
        yield made


def measured(name: str, job: SmallJob, scale: Scale = SCALE) -> tuple[list[Change], list[Stored]]:
    with tqdm(disable=True) as bar:
        return measure(job, TASKS[name], scale, methods_of(scale.methods), bar)


def test_pairs_differ_by_what_restoring_lost(task: str, job: SmallJob, tmp_path: Path) -> None:
    changes, stored = measured(task, job)
    names = ["noise 1e-07", "exact", "adaptive 2 bit", "adaptive 4 bit", "importance 4 bit"]
    expected = [(name, p, *m) for p in SCALE.steps for name in names for m in MOMENTS]
    assert [(c.method, c.point, c.restores, c.after) for c in changes] == expected
    assert all(c.loss == c.auc == c.rare == 0 for c in changes if c.method == "exact")

    def at_once(method: str) -> float:
        return max(abs(c.loss) for c in changes if (c.method, c.after) == (method, 0))

    assert 0 < at_once("noise 1e-07") < at_once("adaptive 4 bit") < at_once("adaptive 2 bit")
    for point in SCALE.steps:
        own = {(one.method, one.kind): one for one in stored if one.point == point}
        assert {one.checkpoints for (_, kind), one in own.items() if kind == "full"} == {1}
        # Two checkpoints in the gap; the second is restored.
        assert {o.checkpoints for (_, kind), o in own.items() if kind != "full"} == {2}
        full = {name: own[name, "full"] for name in names[1:]}
        rows = sum(len(shard.weight) for shard in job.shards)
        assert {one.rows for one in full.values()} == {rows}
        assert full["exact"].weights == 4 * rows * job.shards[0].weight.shape[1]
        widths = [full[name].weights for name in ("adaptive 2 bit", "adaptive 4 bit", "exact")]
        assert widths == sorted(set(widths))
        assert full["importance 4 bit"].weights <= widths[1]
        for (method, kind), one in own.items():
            assert one.dense > 0
            assert one.manifest > 0
            assert one.state == 4 * one.rows
            if kind == "differential":
                assert 0 < one.rows < 2 * rows
                assert 0 < one.ids < 4 * one.rows
                each = own[method, "full"].weights / rows
                assert one.weights / one.rows == pytest.approx(each, rel=0.4)
    _draws(task, changes, stored, tmp_path)


def _draws(name: str, changes: list[Change], stored: list[Stored], folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    plots.require_matplotlib()
    command._report(name, SCALE, changes, stored, folder)
    for picture in (f"fig14-{name}.png", f"pareto-{name}.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("task", ["mf"])
def test_one_save_a_gap_and_no_steps_after(task: str, job: SmallJob) -> None:
    scale = replace(SCALE, saves=1, after=0, points=1, methods=("exact",))
    changes, stored = measured(task, job, scale)
    assert [(c.restores, c.after) for c in changes] == [(1, 0), (2, 0)]
    assert [(one.kind, one.checkpoints) for one in stored] == [("full", 1), ("differential", 1)]


@pytest.mark.parametrize("task", ["deepfm"])
def test_every_method_stores_what_it_says(task: str, job: SmallJob) -> None:
    """Each of the table can be chosen on a trained job; k-means where its library is."""
    job.train(job.batches(3))
    for method in METHODS:
        if method.choose is None or method.name.startswith("kmeans"):
            continue
        widths = set(method.choose(job).widths({"small": 10, "large": 10**6}).values())
        bits = [int(word) for word in method.name.split() if word.isdigit()]
        if method.name.startswith(("importance", "fisher", "delta")):
            assert max(widths) <= 8
        elif bits:
            assert widths == set(bits), method.name
        else:
            assert widths == {{"exact": 32}.get(method.name, 16)}


@pytest.mark.parametrize("task", ["dlrm16", "mf"])
def test_a_job_learns_and_its_state_is_put_back(task: str, job: SmallJob) -> None:
    everything = torch.zeros(len(job.predict()[0]), dtype=torch.bool)
    everything[:50] = True

    def loss() -> float:
        return branches.quality(job, TASKS[task], everything).loss

    start, before = job.keep(), loss()
    batches = job.batches(30)
    job.train(batches)
    after = loss()
    assert after < before
    job.put_back(start)
    assert loss() == before
    job.train(batches)
    assert loss() == after


@pytest.mark.parametrize("task", ["mf"])
def test_rare_samples_are_those_of_ids_seldom_looked_up(task: str, job: SmallJob) -> None:
    seen = Accesses(job)
    trained = job.batches(20)
    seen.add(trained[:7])
    seen.add(trained[7:])
    counts = {
        name: np.bincount(np.concatenate([b.sparse_features[name].values() for b in trained]))
        for name in ("user", "item")
    }
    few = []
    for batch in job.held_out:
        ids = [batch.sparse_features[name].values().tolist() for name in ("user", "item")]
        for user, item in zip(*ids, strict=True):
            looked = [
                int(counts[name][i]) if i < len(counts[name]) else 0
                for name, i in (("user", user), ("item", item))
            ]
            few.append((-sum(n <= branches.FEW for n in looked), min(looked)))
    rare = seen.rare(job.held_out)
    chosen = [key for key, own in zip(few, rare.tolist(), strict=True) if own]
    assert len(chosen) == int(branches.RARE * len(few))
    assert sorted(chosen) == sorted(few)[: len(chosen)]


def test_held_out_ratings_are_never_trained() -> None:
    ids = np.arange(200).reshape(100, 2)
    stream = tasks.RatedSamples(ids, np.arange(100, dtype=np.float32))
    held_out = np.concatenate([s.labels for s in stream.read_eval(10**6, 7, 0, 1)])
    assert len(held_out) == 10

    def trained(position: int, count: int) -> list[Samples]:
        reader = stream.read(position, 30, 0, 1)
        return [next(reader) for _ in range(count)]

    epoch = np.concatenate([samples.labels for samples in trained(0, 3)])
    assert sorted([*epoch, *held_out]) == list(range(100))
    # Any position is the same sample however it is reached, and the stream goes round.
    assert np.array_equal(trained(30, 3)[1].sparse, trained(60, 1)[0].sparse)
    assert np.array_equal(trained(90, 1)[0].labels, epoch[:30])


def test_ratings_come_from_a_folder(tmp_path: Path) -> None:
    lines = "".join(
        f"{u}\t{i}\t{1 + (u * i) % 5}\t{874965758 + u}\n" for u in (1, 2) for i in (10, 20)
    )
    for name, text in {**GROUPLENS, "u.data": 25 * lines}.items():
        (tmp_path / name).write_text(text, encoding="latin1")
    scale = replace(SCALE, rated_batch=16)
    with TASKS["deepfm"].job(scale, Sources(ratings=tmp_path)) as made:
        assert sum(len(shard.weight) for shard in made.shards) < 40
        made.train(made.batches(2))


def test_intervals_are_students() -> None:
    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3
    assert interval.high - 3 == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert interval.high - 3 == pytest.approx(3 - interval.low)
    assert math.isnan(Interval.of([1.0]).low)
    random = np.random.default_rng(0)
    for count in (2, 8, 40):
        draws = [Interval.of(random.standard_normal(count).tolist()) for _ in range(4000)]
        held = np.mean([one.low <= 0 <= one.high for one in draws])
        assert 0.935 < held < 0.965


def test_summaries_average_over_points_and_add_up_bytes() -> None:
    changes = [Change("a", p, 1, 0, 0.1 * p, -0.1 * p, 0.2) for p in (1, 3)]
    (effect,) = effects(changes)
    assert (effect.method, effect.restores, effect.after) == ("a", 1, 0)
    assert effect.loss.mean == pytest.approx(0.2)
    assert effect.rare == Interval(0.2, 0.2, 0.2)
    stored = [
        Stored("a", point, "differential", 2, 10 * point, 40, 20, 10, 100, 50) for point in (1, 3)
    ]
    (size,) = sizes([*stored, Stored("a", 1, "full", 0, 0, 0, 0, 0, 0, 0)])
    assert size == Size("a", "differential", 10, 2, 1, 0.5, 50, 25)
    assert size.row == 3.5


def test_the_smallest_harmless_method_is_named() -> None:
    def effect(method: str, high: float) -> Effect:
        none = Interval(0, 0, 0)
        return Effect(method, 20, 0, Interval(high / 2, 0, high), none, none)

    found = [effect("noise 1e-07", 1e-4), effect("wide", 0), effect("narrow", 5.5e-4)]
    bytes_of = [
        Size(name, "differential", 1, weights, 0, 0, 0, 0)
        for name, weights in (("wide", 24), ("narrow", 8))
    ]
    assert smallest(found, bytes_of, 5e-4) == "narrow"
    assert smallest(found, bytes_of, 4e-4) == "wide"
    assert smallest([effect("wide", 1), effect("narrow", 1)], bytes_of, 5e-4) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_scales_have_states_enough(name: str) -> None:
    scale = Scale.read(name)
    assert scale.points >= 8
    assert scale.restores == (1, 3, 10, 20)
    chosen = {method.name for method in methods_of(scale.methods)}
    assert {"noise 1e-07", "exact", "adaptive 2 bit", "adaptive 8 bit"} <= chosen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("points: 0", "points must be"),
        ("saves: 11", "no room for 11 saves"),
        ("restores: [3, 1]", "must ascend"),
        ("restores: []", "must ascend"),
        ("bogus: 1", "bogus"),
        ("first: x", "first must be"),
        ("[1, 2]", "not a scale"),
        ("a: [", "not a scale"),
    ],
)
def test_a_wrong_scale_is_refused(tmp_path: Path, change: str, message: str) -> None:
    kept = [
        line
        for line in (FOLDER / "minutes.yaml").read_text().splitlines()
        if line.partition(":")[0] != change.partition(":")[0]
    ]
    path = tmp_path / "own.yaml"
    path.write_text("\n".join([*(kept if ":" in change and "a:" not in change else []), change]))
    with pytest.raises(ValueError, match=message):
        Scale.read(str(path))


def test_an_unknown_scale_or_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"choose among .*minutes"):
        Scale.read("days")
    with pytest.raises(ValueError, match="there are noise"):
        methods_of(["exact", "delta?"])


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    content = (FOLDER / "minutes.yaml").read_text()
    for old, new in (
        ("first: 300", "first: 4"),
        ("every: 60", "every: 2"),
        ("points: 8", "points: 2"),
        ("[1, 3, 10, 20]", "[1, 2]"),
        ("gap: 10", "gap: 2"),
        ("after: 20", "after: 2"),
        ("synthetic_ratings: 100000", "synthetic_ratings: 2000"),
    ):
        assert old in content
        content = content.replace(old, new)
    (tmp_path / "tiny.yaml").write_text(content)
    options = ["--scale", str(tmp_path / "tiny.yaml"), "--task", "mf", "--out", str(tmp_path)]
    options += ["--methods", "noise*", "exact", "adaptive 4 bit"]
    monkeypatch.setattr("sys.argv", ["", *options, "--json", str(tmp_path / "accuracy.json")])
    assert command.main() == 0
    numbers = json.loads((tmp_path / "accuracy.json").read_text())
    assert numbers["ratings"] == "synthetic"
    assert numbers["scale"]["points"] == 2
    assert list(numbers["tasks"]) == ["mf"]
    assert (tmp_path / "pareto-mf.png").exists()
    printed = capsys.readouterr().out
    assert "exact rows: loss and AUC change by 0" in printed
    assert "adaptive 4 bit" in printed


def test_exact_rows_that_change_anything_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> tuple[list[Change], list[Stored]]:
        return [Change("exact", 1, 1, 0, 1e-12, 0, 0)], []

    monkeypatch.setattr(command, "_measure", wrong)
    monkeypatch.setattr(command, "_report", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["", "--task", "mf"])
    assert command.main() == 1


def test_importance_takes_no_more_bytes_than_the_width() -> None:
    with TASKS["mf"].job(SCALE, Sources()) as made:
        made.train(made.batches(5))
        budgets = [methods.mean_bits_within(made, bits) for bits in methods.BUDGETS]
    assert budgets == sorted(budgets)
    assert all(2 <= budget <= bits for budget, bits in zip(budgets, methods.BUDGETS, strict=True))
