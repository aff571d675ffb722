"""Run figure 17's recipe at a tiny size; check its factors against the stored files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm

from recipes.figures import overall
from recipes.figures.overall import PAPER, QUICK, RESTORES, WAYS, Plan, Way, factors, measure, run
from recipes.figures.small_job import small_job
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive, Quantization

TINY = Plan(3, ("model.scale=0.0003", "trainer.batch_size=128"), fraction=0.2)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[CheckpointReport, int]]:
    """Take checkpoints; return each report, and the bytes of the files of all until then."""
    found = []
    root = tmp_path_factory.mktemp("run")
    with (
        small_job(["model.scale=0.0003", "trainer.batch_size=128"]) as job,
        Checkpointer(
            root, model=job.model, policy=Consecutive(), retention=None, quantization=4
        ) as checkpointer,
    ):
        for _ in range(3):
            job.train(job.batches(2))
            report = checkpointer.save()
            assert report is not None
            files = [path for path in root.glob("seq-*/*") if path.is_file()]
            found.append((report, sum(path.stat().st_size for path in files)))
    return found


def test_factors_are_those_of_the_files(reports: list[tuple[CheckpointReport, int]]) -> None:
    own = [report for report, _ in reports]
    stored = reports[-1][1]
    found = factors(own)
    fp32 = own[0].full_fp32_bytes
    assert found.written == pytest.approx(fp32 / (stored / 3))
    assert found.kept == pytest.approx(fp32 / stored)  # consecutive: all three
    dense = [report.bytes["dense"] for report in own]
    assert found.tables_kept == pytest.approx((fp32 - dense[0]) / (stored - sum(dense)))
    assert found.tables_written > found.written > found.kept


def test_only_whole_cycles_count_and_chains_end_at_baselines(
    reports: list[tuple[CheckpointReport, int]],
) -> None:
    full, second, _ = (report for report, _ in reports)
    again = replace(full, id="again")
    found = factors([full, second, again])
    assert found.written == pytest.approx(
        2 * full.full_fp32_bytes / (full.total_bytes + second.total_bytes)
    )
    both = full.total_bytes + second.total_bytes
    assert found.kept == pytest.approx(full.full_fp32_bytes / both)


@pytest.mark.slow  # of two ways the command's test shows it
def test_fewer_restores_write_less() -> None:
    rows = measure(16, TINY, None)
    cases = [
        (name, case)
        for name, way in WAYS.items()
        for case in (RESTORES if way.by_restores else ["any"])
    ]
    assert [(row.way, row.restores) for row in rows] == cases
    for way in ("widths", "widths, log8"):
        own = [row for row in rows if row.way == way]
        assert [row.bits for row in own] == [2, 3, 4, 8]
        written = [row.factors.tables_written for row in own]
        assert written == sorted(written, reverse=True)
    assert rows[0].factors.tables_written < rows[4].factors.tables_written
    for plain, coded in zip(rows[1:5], rows[5:9], strict=True):
        assert plain.factors.tables_written < coded.factors.tables_written
    assert rows[9].factors.tables_written > rows[0].factors.tables_written
    assert all(len(row.written_bytes) == 3 for row in rows)
    assert all(row.baselines[0] == 0 for row in rows)


def test_a_run_begins_where_the_job_is() -> None:
    way = Way(Consecutive(), lambda _: Quantization())
    with small_job(["model.scale=0.0003", "trainer.batch_size=128"]) as job, tqdm() as bar:
        start = job.keep()
        one = run(job, way, 0, 2, 2, bar)
        job.put_back(start)
        two = run(job, way, 0, 2, 2, bar)
    assert [r.modified_rows for r in one] == [r.modified_rows for r in two]
    assert [r.kind for r in one] == ["full", "differential"]


def test_the_command_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    monkeypatch.setattr(overall, "QUICK", TINY)
    ways = {name: WAYS[name] for name in ("exact", "widths")}
    monkeypatch.setattr(overall, "WAYS", ways)
    options = ["--quick", "--dim", "8", "--json", str(tmp_path / "overall.json")]
    monkeypatch.setattr("sys.argv", ["", *options, "--png", str(tmp_path / "fig17.png")])
    assert overall.main() == 0
    numbers = json.loads((tmp_path / "overall.json").read_text())
    assert {row["dim"] for row in numbers["rows"]} == {8}
    exact, *widths = (row["factors"]["tables_written"] for row in numbers["rows"])
    assert [row["bits"] for row in numbers["rows"][1:]] == [2, 3, 4, 8]
    assert widths == sorted(widths, reverse=True)
    assert exact < widths[-1]
    assert (tmp_path / "fig17.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(f"{value:g}" in printed for value in PAPER["L <= 1"])
    assert QUICK.fraction == 0.26


def test_too_few_samples_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "\t".join(["1", *["2"] * 13, *["ff"] * 26])
    path = tmp_path / "train.txt"
    path.write_text(10 * f"{line}\n")
    monkeypatch.setattr("sys.argv", ["", "--quick", "--dim", "8", "--data", str(path)])
    with pytest.raises(SystemExit, match=r"samples"):
        overall.main()
