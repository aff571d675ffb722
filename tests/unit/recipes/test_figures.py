"""Run the figures' recipes at small sizes: check the numbers against the measured values."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recipes.figures import plots, quantization
from recipes.figures.quantization import Size, all_errors, load_rows, sample, sweeps, trained_rows
from recipes.figures.small_job import SmallJob, small_job

SMALL_MODEL = ["model.scale=0.0002", "trainer.batch_size=128", "trainer.eval_samples=512"]
SIZE = Size(steps=2, rows=256, timed_bytes=1 << 16, rounds=1)


@pytest.fixture
def job() -> Iterator[SmallJob]:
    with small_job(SMALL_MODEL) as made:
        yield made


@pytest.fixture(scope="module")
def errors() -> dict[tuple[str, str, int], quantization.Error]:
    pytest.importorskip("kmeans1d", reason="the codec kmeans needs it")
    rows = torch.rand((256, 32), generator=torch.Generator().manual_seed(0)) - 0.3
    return {(e.rows, e.method, e.bits): e for e in all_errors(rows)}


@pytest.mark.parametrize("rows", ["given", "gaussian"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_better_methods_have_smaller_errors(
    errors: dict[tuple[str, str, int], quantization.Error], rows: str, bits: int
) -> None:
    order = ["symmetric", "asymmetric", "greedy", "adaptive", "k-means per row"]
    found = [errors[rows, method, bits] for method in order]
    for worse, better in itertools.pairwise(found):
        assert better.relative < worse.relative
        assert better.l2 < worse.l2


def test_errors_and_bits_belong_together(
    errors: dict[tuple[str, str, int], quantization.Error],
) -> None:
    for (_, method, bits), error in errors.items():
        assert error.total_bits > bits
        assert error.shannon == 2.0**-error.total_bits
        if error.rows == "gaussian":
            assert error.rms > error.shannon, (method, bits)  # the bound of any code
    assert errors["given", "adaptive", 4].total_bits == 4 + 32 / 32  # fp16 scale and bias
    assert errors["given", "adaptive", 8].total_bits == 8 + 64 / 32  # fp32


def test_sweeps_show_what_the_search_gains() -> None:
    rows = torch.randn((256, 64), generator=torch.Generator().manual_seed(0))
    swept = sweeps(rows, SIZE)
    assert [choice["bits"] for choice in swept["chosen"]] == [2, 3, 4]
    for choice in swept["chosen"]:
        bits = choice["bits"]
        by_bins, by_ratio = (
            {s[x]: s["improvement"] for s in swept[name] if s["bits"] == bits}
            for name, x in (("by_bins", "num_bins"), ("by_ratio", "ratio"))
        )
        assert by_bins[5] < by_bins[25] <= by_bins[50] + 0.01
        assert by_ratio[0.1] <= by_ratio[0.5] <= by_ratio[1.0] + 0.01
        assert by_bins[choice["num_bins"]] > 0.9 * max(by_bins.values())
        assert by_ratio[choice["ratio"]] > 0.9 * max(by_ratio.values())
        others = {o["method"]: o["improvement"] for o in swept["others"] if o["bits"] == bits}
        assert others["asymmetric"] == 0
        assert others["adaptive"] > max(by_bins.values())
    assert all(s["seconds_per_gb"] > 0 for name in ("by_bins", "by_ratio") for s in swept[name])
    # At 2 bit the range must shrink by half, at 4 bit a little.
    gained = {s["bits"]: s["improvement"] for s in swept["by_ratio"] if s["ratio"] == 0.1}
    best = {s["bits"]: s["improvement"] for s in swept["by_ratio"] if s["ratio"] == 1.0}
    assert gained[2] / best[2] < gained[4] / best[4]


def test_rows_of_a_file(tmp_path: Path) -> None:
    one, two = torch.ones(2, 3), torch.zeros(1, 3, dtype=torch.float16)
    for content, expected in ((one, 2), ({"a": one, "b": two}, 3), ([two], 1)):
        torch.save(content, tmp_path / "rows.pt")
        rows = load_rows(tmp_path / "rows.pt")
        assert rows.shape == (expected, 3)
        assert rows.dtype == torch.float32
    for wrong in (torch.ones(3), {"a": 1}, [one, torch.ones(1, 4)], []):
        torch.save(wrong, tmp_path / "rows.pt")
        with pytest.raises(ValueError, match=r"rows\.pt"):
            load_rows(tmp_path / "rows.pt")


def test_a_sample_has_no_row_without_a_relative_error() -> None:
    rows = torch.ones(5, 2)
    rows[1], rows[3, 1] = 0, torch.nan
    assert torch.equal(sample(rows, 10), torch.ones(3, 2))
    assert len(sample(rows, 2)) == 2


def test_trained_rows_are_those_that_training_changed() -> None:
    few, more = trained_rows(1, 8), trained_rows(3, 8)
    assert few.shape[1] == more.shape[1] == 8
    assert 26 < len(few) < len(more) < 26 * 3 * 1024


def test_the_quantization_command_writes_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    pytest.importorskip("kmeans1d", reason="the codec kmeans needs it")
    torch.save(torch.randn(300, 16), tmp_path / "rows.pt")
    monkeypatch.setattr(quantization, "QUICK", SIZE)
    threads = str(torch.get_num_threads())
    options = ["--rows", str(tmp_path / "rows.pt"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["", "--quick", "--threads", threads, *options])
    assert quantization.main() == 0
    numbers = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert (numbers["source"], numbers["rows"], numbers["dim"]) == ("rows.pt", 256, 16)
    for name in plots.NAMES:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "adaptive" in capsys.readouterr().out


def test_a_state_is_put_back_to_the_bit(job: SmallJob) -> None:
    job.train(job.batches(2))
    start, batches = job.keep(), job.batches(2)
    before = job.evaluate()
    job.train(batches)
    after, there = job.evaluate(), job.keep()
    assert before != after
    job.put_back(start)
    assert job.evaluate() == before
    job.train(batches)
    assert job.evaluate() == after
    assert job.reader.position == there.position == start.position + 2 * 128
    for one, two in zip(job.keep().tables, there.tables, strict=True):
        assert torch.equal(one, two)
