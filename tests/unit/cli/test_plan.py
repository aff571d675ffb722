"""Compare the forecasts of `plan` with sums done by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.console import Console
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.delta.grid_references import GridReferences
from torchrec_checknrun.delta.lc.references import ValueReferences
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.tools.forecast import POLICIES, Job, forecast

# 8 columns exact and 4 bytes of state: 36 bytes a row; 100 bytes of ids in a differential one.
SMALL: dict[str, Any] = {
    "rows": 800,
    "dim": 8,
    "bits": 32,
    "fraction": 0.25,
    "growth": 0.5,
    "job_hours": 2.0,
    "interval_minutes": 30.0,
    "nodes": 4,
    "mtbf_hours": 8.0,
}
FULL = 800 * 36


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 100])
def test_rows_take_as_many_bytes_as_the_codec_gives_them(dim: int, bits: int) -> None:
    job = Job(rows=1, dim=dim, bits=bits, optimizer_bytes=0)
    assert job.stored_bytes(1) == row_bytes(dim, bits)


def test_one_shot_by_hand() -> None:
    # Four checkpoints: all rows, then 200, 283 (0.25 · √2) and 346 (0.25 · √3).
    found = forecast(Job(**SMALL, copy_bandwidth=1000.0, read_bandwidth=500.0), "one-shot")
    written = [FULL, 200 * 36 + 100, 283 * 36 + 100, 346 * 36 + 100]
    assert found.checkpoints == 4
    assert found.baseline_every is None
    assert found.mean_bytes == sum(written) / 4
    assert found.largest_bytes == FULL
    assert found.mean_bandwidth == sum(written) / 4 / 1800
    assert found.full_bandwidth == FULL / 1800
    assert found.reduction == pytest.approx(4 * FULL / sum(written))
    assert found.kept_bytes == FULL + written[3]
    assert found.peak_bytes == FULL + written[2] + written[3]
    assert found.capacity_reduction == 2 * FULL / found.peak_bytes
    assert found.longest_chain == 2
    stall = (800 + 200 + 283 + 346) * 36 / 1000 / 4
    assert found.mean_stall == pytest.approx(stall)
    assert found.longest_stall == pytest.approx(FULL / 1000)
    assert found.stalled == pytest.approx(stall / (1800 + stall))
    # 4 nodes fail once in 8 hours each: the job once in 2 hours, and loses 15 minutes and a read.
    read = found.kept_bytes / 500
    assert found.longest_read == read
    assert found.lost == pytest.approx((900 + read) / 7200)
    assert found.best_interval_minutes == pytest.approx(math.sqrt(2 * stall * 7200) / 60)


def test_consecutive_by_hand() -> None:
    found = forecast(Job(**SMALL), "consecutive")
    assert found.mean_bytes == (FULL + 3 * (200 * 36 + 100)) / 4
    assert found.kept_bytes == found.peak_bytes == FULL + 3 * (200 * 36 + 100)
    assert found.longest_chain == 4
    assert found.longest_read is None
    # By default: 6 GB/s on each of 4 nodes, for all rows once and a quarter three times.
    assert found.mean_stall == pytest.approx((800 + 3 * 200) * 36 / 24e9 / 4)


def test_intermittent_by_hand() -> None:
    # Sizes 0.25 each time: 1 + 0.25 i > 0.25 (i + 1) for every i, so there is no second full one.
    flat = forecast(Job(**{**SMALL, "growth": 0.0, "job_hours": 20.0}), "intermittent")
    assert flat.baseline_every is None
    # 1 + 0.25 + 0.5 > 3 · 0.5, but 1 + 0.25 + 0.5 + 0.75 <= 4 · 0.75: a full one follows three.
    rising = forecast(Job(**{**SMALL, "growth": 1.0, "job_hours": 20.0}), "intermittent")
    assert rising.baseline_every == 4.0


@pytest.mark.parametrize(("growth", "every"), [(0.33, 7.0), (None, 4.0), (0.28, 9.0)])
def test_intermittent_at_the_papers_fraction(growth: float | None, every: float) -> None:
    """Compare F <= I by hand: of S = 0.26 · i^0.33 first at i = 6, of 1 − 0.74^i at 3, of i^0.28 at
    8.
    """
    job = Job(10**9, 64, growth=growth, bits=32, job_hours=300.0)
    assert forecast(job, "intermittent").baseline_every == every
    sizes: list[float] = []
    while not sizes or 1 + sum(sizes) > (len(sizes) + 1) * sizes[-1]:
        i = len(sizes) + 1
        sizes.append(1 - 0.74**i if growth is None else 0.26 * i**growth)
    assert len(sizes) + 1 == every


def test_rows_grow_by_either_law() -> None:
    random = Job(100, 8, fraction=0.5, growth=None)
    assert [random.modified(i) for i in (1, 2, 3)] == [0.5, 0.75, 0.875]
    slow = Job(100, 8, fraction=0.5, growth=0.5)
    assert [slow.modified(i) for i in (1, 4, 9)] == [0.5, 1.0, 1.0]


def test_width_follows_the_expected_restores() -> None:
    restores = {1: 2, 3: 3, 20: 4, 21: 8}
    for count, bits in restores.items():
        job = Job(100, 64, nodes=count, mtbf_hours=72.0, job_hours=72.0)
        assert (job.restores, job.width) == (count, bits)
    assert Job(100, 64, nodes=21, mtbf_hours=72.0, job_hours=72.0, bits=2).width == 2


def test_a_quantized_full_checkpoint() -> None:
    # 64 columns at 4 bit: 32 + 4 bytes, 4 of state; 260 in fp32.
    found = forecast(Job(1000, 64, bits=4), "full")
    assert found.mean_bytes == 40_000
    assert found.reduction == 260 / 40
    assert found.peak_bytes == 80_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("job_hours", "interval"), [(1e-9, 3e-8), (1e18, 1e18)])
@pytest.mark.parametrize("mtbf_hours", [1e-9, 1e18])
@pytest.mark.parametrize("bandwidth", [1e-9, 1e18])
@pytest.mark.parametrize("size", [1, 10**18])
def test_at_its_limits_all_is_finite(
    policy: str, job_hours: float, interval: float, mtbf_hours: float, bandwidth: float, size: int
) -> None:
    job = Job(
        rows=size,
        dim=size,
        interval_minutes=interval,
        job_hours=job_hours,
        mtbf_hours=mtbf_hours,
        copy_bandwidth=bandwidth,
        read_bandwidth=bandwidth,
    )
    numbers = [n for n in vars(forecast(job, policy)).values() if isinstance(n, (int, float))]
    assert all(map(math.isfinite, numbers))


class TestConsole:
    def test_json_holds_the_forecast(self, console: Console) -> None:
        arguments = [
            f"--{name.replace('_', '-').removesuffix('-minutes')}={value}"
            for name, value in SMALL.items()
        ]
        found = console.json("plan", *arguments, "--copy-bandwidth", "1e-6")
        assert found["full_fp32_bytes"] == FULL
        assert found["expected_restores"] == 1
        assert found["width"] == 32
        assert found["reference_bytes"] == {
            "delta": 800 * 12,
            "delta and logdelta": 800 * 14,
            "lc": 800 * 33,
        }
        assert [one["policy"] for one in found["policies"]] == list(POLICIES)
        wanted = forecast(Job(**SMALL, copy_bandwidth=1000.0), "one-shot")
        assert found["policies"][1] == vars(wanted)

    def test_text_holds_the_forecast(self, console: Console) -> None:
        result = console.run("plan", "--rows", "2e9", "--dim", 64, "--growth", "random")
        assert result.code == 0
        assert "full in fp32: 520 GB; expected restores: 1.15; rows stored in 3 bit" in result.out
        assert "stalls: at 96 GB/s, 6 a node" in result.out
        assert "restores: 164 GB with method=delta (10.2 GB a node), 168 GB with" in result.out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--rows", "many"], "'many' is no number"),
            (["--rows", "0"], "rows must be positive"),
            (["--rows", "9", "--fraction", "2"], "fraction must be above 0"),
            (["--rows", "9", "--growth", "fast"], "'fast' is no number: write one from 0 to 1"),
            (["--rows", "9", "--bits", "5"], "bits must be 2, 3, 4, 8 or 32"),
            (["--rows", "9", "--job-hours", "0.1"], "less than one interval"),
            (["--rows", "1e308"], "rows must be from 1e-09 to 1e+18"),
            (["--rows", "9", "--dense-bytes", "1e308"], "dense_bytes must be at most 1e+18"),
            (["--rows", "9", "--dim", "9" * 40], "dim must be from 1e-09 to 1e+18"),
            (["--rows", "9", "--job-hours", "inf"], "job_hours must be from 1e-09 to 1e+18"),
            (["--rows", "9", "--mtbf-hours", "inf"], "mtbf_hours must be from 1e-09 to 1e+18"),
            (["--rows", "9", "--mtbf-hours", "1e-320"], "mtbf_hours must be from 1e-09"),
            (["--rows", "9", "--interval", "1e-300"], "interval_minutes must be from 1e-09"),
            (["--rows", "9", "--copy-bandwidth", "1e-320"], "copy_bandwidth must be from 1e-09"),
            ([], "--rows"),
        ],
    )
    def test_mistakes_are_named(self, console: Console, arguments: list[str], message: str) -> None:
        result = console.run("plan", "--dim", 8, *arguments)
        assert result.code == 2
        assert message in " ".join(result.err.replace("│", " ").split())


@pytest.mark.parametrize("dim", [4, 16, 64, 100])
def test_references_take_what_links_take(dim: int) -> None:
    """Forecast the memory by which a Checkpointer decides which tables get links."""
    place = Rectangle(0, 1000, 0, dim)
    found = Job(rows=1000, dim=dim).reference_bytes
    assert found == {
        "delta": GridReferences.expected_bytes(place),
        "delta and logdelta": GridReferences.expected_bytes(place, states=1),
        "lc": ValueReferences.expected_bytes(place),
    }
    assert found["lc"] == ValueReferences("t", place).bytes
