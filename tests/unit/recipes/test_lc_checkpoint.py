"""Run the figure of LC-Checkpoint at a small size; check its schemes and its goals."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.benchmarks import lc_rows
from recipes.figures.lc_checkpoint import __main__ as command
from recipes.figures.lc_checkpoint import jobs, schemes
from recipes.figures.lc_checkpoint.__main__ import Plan, Row, judge

PLAN = Plan(iterations=60, every=10, failures=2, most=12)


def few_digits() -> tuple[np.ndarray, np.ndarray]:
    """Make a few noisy images of ten kinds."""
    random = np.random.default_rng(0)
    classes = np.arange(300) % 10
    kinds = (random.random((10, 8, 8)) > 0.6).astype(np.float32)
    noise = 0.1 * random.random((300, 8, 8), np.float32)
    return kinds[classes] + noise, classes


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "digits", few_digits)


def changed(size: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    before = random.standard_normal(size).astype(np.float32)
    sparse = (random.random(size) < 0.2) * np.exp(random.standard_normal(size))
    return (before + 0.1 * sparse * random.choice([-1, 1], size)).astype(np.float32), before


SHAPES = [torch.Size((100, 30)), torch.Size((10, 10, 9)), torch.Size((100,))]


def test_rows_lie_across_the_longest_dimension() -> None:
    rows = schemes.rows_of(SHAPES)
    assert np.bincount(rows).tolist() == [30] * 100 + [90] * 10 + [100]
    assert schemes.rows_of([torch.Size((2, 3)), torch.Size((2,))]).tolist() == [0, 1, 2] * 2 + [
        3,
        3,
    ]


@pytest.mark.parametrize("size", [300.0, 1000.0, 4000.0])
def test_schemes_take_the_bytes_that_they_may(size: int) -> None:
    now, before = changed()
    for scheme in (
        schemes.topn_within(size, len(now)),
        schemes.scar_within(size, SHAPES),
        schemes.uniform_within(size),
    ):
        after, taken = scheme(now, before)
        assert after.dtype == np.float32
        assert 0.5 * size < taken <= max(size, 404)
        assert np.linalg.norm(after - now) < np.linalg.norm(before - now)


def test_topn_and_scar_store_the_largest_changes_bit_for_bit() -> None:
    now, before = changed()
    after, _ = schemes.topn(0.01)(now, before)
    stored = after != before
    assert stored.sum() == 40
    assert np.array_equal(after[stored], now[stored])
    assert np.abs(now - before)[stored].min() >= np.abs(now - before)[~stored].max()
    after, _ = schemes.scar_within(1000, SHAPES)(now, before)
    rows = schemes.rows_of(SHAPES)
    distance = np.bincount(rows, (now - before) ** 2)
    kept = np.unique(rows[after != before])
    assert distance[kept].min() >= np.delete(distance, kept).max()
    assert np.array_equal(after[np.isin(rows, kept)], now[np.isin(rows, kept)])


def test_more_bits_or_bytes_are_nearer() -> None:
    now, before = changed()
    for ladder in (
        [schemes.lc_checkpoint(bits) for bits in (2, 3, 4)],
        [schemes.naive(bits, SHAPES) for bits in (2, 4, 8)],
        [schemes.uniform_within(size) for size in (400, 800, 1600)],
    ):
        errors, sizes = zip(
            *((np.linalg.norm(s(now, before)[0] - now), s(now, before)[1]) for s in ladder),
            strict=True,
        )
        assert all(one > other for one, other in itertools.pairwise(errors))
        assert all(one < other for one, other in itertools.pairwise(sizes))


@pytest.mark.parametrize("name", jobs.JOBS)
def test_a_job_learns_and_repeats_its_bits(name: str) -> None:
    vectors = []
    for _ in range(2):
        with jobs.job(name, None) as made:
            assert made.vector().dtype == np.float32
            before = made.evaluate()
            for iteration in range(40):
                made.train(iteration)
            assert made.evaluate() < before
            vectors.append(made.vector())
            made.put(vectors[0])
            assert np.array_equal(made.vector(), vectors[0])
    assert np.array_equal(vectors[0], vectors[1])


def test_sizes_are_the_papers() -> None:
    sizes = {}
    for name in jobs.JOBS:
        with jobs.job(name, None) as made:
            sizes[name] = len(made.vector())
    assert sizes["logistic regression"] == 7850
    assert sizes["LeNet"] == 61706
    assert sizes["matrix factorisation"] == 32 * (943 + 1682)


@pytest.mark.skipif(find_spec("sklearn") is None, reason="digits come with scikit-learn")
def test_digits_are_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    images, classes = jobs.digits()
    assert images.shape == (1797, 8, 8)
    assert images.max() == 1
    assert np.bincount(classes).min() > 170


def test_without_scikit_learn_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install"):
        jobs.digits()


def test_a_run_without_loss_needs_no_rework() -> None:
    with jobs.job("logistic regression", None) as made:
        run = command.train(made, PLAN)
        exact = command.play(made, run, lambda now, _: (now, 4.0 * len(now)), PLAN)
        nothing = command.play(made, run, lambda _, before: (before, 1.0), PLAN)
    assert exact == {"ratio": 1.0, "error": 0.0, "loss": 0.0, "rework": 0.0, "gave_up": 0}
    assert nothing["loss"] > 0
    assert nothing["rework"] > 5


def test_every_scheme_has_a_row() -> None:
    rows = list(command.compare("logistic regression", None, PLAN))
    assert len(rows) == 12
    by_name = {(row.scheme, row.matched, row.bits): row for row in rows}
    ratios = [by_name["LC", None, bits].ratio for bits in (2, 3, 4)]
    assert ratios == sorted(ratios, reverse=True)
    for matched in (2, 3):
        for name in ("TOPN", "SCAR", "uniform step"):
            assert by_name[name, matched, None].ratio > 0.7 * by_name["LC", None, matched].ratio
    assert [round(by_name["naive", None, bits].ratio) for bits in (2, 4, 8)] == [16, 8, 4]


def row(job: str, scheme: str, bits: int, ratio: float, rework: float) -> Row:
    matched = bits if scheme == "SCAR" else None
    own = bits if scheme == "LC" else None
    return Row(job, scheme, matched, own, ratio, 0.1, 0.1, rework, 0)


def test_missed_goals_are_named() -> None:
    def rows(ratio: float, rework: float) -> list[Row]:
        return [
            row("logistic regression", "LC", 2, ratio, rework),
            row("logistic regression", "SCAR", 2, 28, 40),
            row("matrix factorisation", "LC", 3, ratio, rework),
            row("matrix factorisation", "SCAR", 3, 23, 40),
        ]

    assert judge(rows(28, 8)) == []
    assert judge(rows(33, 8)) == ["logistic regression, x = 2: ratio 33.0, wanted 26 to 32"]
    assert judge(rows(28, 9)) == [
        "matrix factorisation, x = 3: rework 9.0, wanted at most 0.20 of SCAR's 40.0"
    ]
    assert len(judge(rows(10, 11))) == 4


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", Plan(iterations=20, every=10, failures=1, most=2))
    monkeypatch.setattr("sys.argv", ["", "--quick", "--json", str(tmp_path / "lc.json")])
    assert command.main() == 0
    numbers = json.loads((tmp_path / "lc.json").read_text())
    assert numbers["ratings"] == "synthetic ratings"
    assert len(numbers["rows"]) == 36
    assert "LeNet" in capsys.readouterr().out


def test_a_folder_without_ratings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["", "--quick", "--ratings", str(tmp_path)])
    monkeypatch.setattr(command, "QUICK", Plan(iterations=20, every=10, failures=1, most=2))
    with pytest.raises(SystemExit, match="name the folder of ml-100k"):
        command.main()


def test_rows_are_measured() -> None:
    found = [cell.strip() for cell in lc_rows.line(2, 16, 512, 1).strip("| ").split("|")]
    assert found[:2] == ["2", "16"]
    assert 1.9 < float(found[2]) < 2.5  # a bit for a value at least, and the table of codes
    assert found[-1] == "65"
    assert len(found) == 6
