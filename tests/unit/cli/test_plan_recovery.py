"""Compare kinds of recovery by `plan --max-pls`: given, measured, computed and assumed figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.chains import Part, new_root, one_thread, write
from tests.unit.console import Console
from torchrec_checknrun.overhead import FailingJob, Recovery, choose
from torchrec_checknrun.root.report import Progress, RestoreReport, checkpoint_report
from torchrec_checknrun.tools.forecast import Job, forecast

CPR = ["--nodes", 8, "--mtbf-hours", 224, "--job-hours", 56, "--max-pls", 0.1]
TIMES = ["--save-seconds", 300, "--durable-seconds", 0, "--load-seconds", 300]
SIZES = ["--rows", "2e9", "--dim", 128]


def restored(seconds: float) -> dict[str, Any]:
    return RestoreReport("a", 1, 1, ("a",), (), False, seconds).to_json()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a run's events: three checkpoints, two restores, and one line that a kill cut off."""
    root = new_root()
    with one_thread():
        full = write(root, 40, [Part((0, 8), list(range(40)), 10)])
        later = write(root, 40, [Part((0, 8), [1, 2], 10)], full)
    reports = [
        checkpoint_report(full, 1, Progress(staged=2.0, committed=9.0)),
        checkpoint_report(later, 1, Progress(staged=1.0, committed=3.0)),
    ]
    events: list[dict[str, Any]] = [
        {"event": "start", "restored": None},
        {"event": "checkpoint", **reports[0].to_json()},
        {"event": "step", "seconds": "no number"},
        reports[1].to_json(),
        {"event": "checkpoint", **reports[1].to_json(), "unchanged": True, "stall_seconds": 77.0},
        {"event": "start", "restored": restored(10.0)},
        {"event": "restore", **restored(20.0)},
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "chec')
    return path


def test_json_holds_the_choice(console: Console) -> None:
    found = console.json("plan", *CPR, *TIMES, "--restart-seconds", 300)
    assert list(found) == ["recovery"]
    recovery = found["recovery"]
    assert (recovery["mtbf_hours"], recovery["ranks"], recovery["lost_ranks"]) == (28, 8, 1)
    wanted = choose(FailingJob(56, 28, 8, 300, 300, 300), 0.1)
    assert recovery["best"] == {
        "recovery": "partial",
        "interval_hours": wanted.best.interval_hours,
    }
    assert [one["recovery"] for one in recovery["candidates"]] == [
        "full",
        "naive partial",
        "partial",
    ]
    for one, candidate in zip(recovery["candidates"], wanted.candidates, strict=True):
        assert one["overhead"] == candidate.overhead
        assert one["pls"] == candidate.pls
        released = (Recovery.FULL, Recovery.IMAGES_FULL, Recovery.IMAGES_PARTIAL)
        assert one["in_this_release"] == (candidate.recovery in released)
    sources = {name: figure["source"] for name, figure in recovery["figures"].items()}
    assert sources == {
        **dict.fromkeys(
            ("save_seconds", "durable_seconds", "load_seconds", "restart_seconds"), "given"
        ),
        "process_deaths": "assumed",
    }


def test_text_names_what_is_not_there(console: Console) -> None:
    result = console.run("plan", *CPR, *TIMES, "--process-deaths", 0.9)
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == (
        "the job fails every 28 h; 8 ranks hold tables, of which a failure takes 1; PLS at most 0.1"
    )
    assert "save seconds 300 given" in lines
    assert "restart seconds 300 assumed" in lines
    assert "journal 0.025 measured on two cores" in lines
    assert "full 2.16 h 3.858% 3.858% 0.595% 0.000% 8.310% 0" in lines
    assert (
        "partial 44.8 h 0.186% 0.000% 0.335% 0.000% 0.521% 0.1 "
        "only where other ranks' processes live on"
    ) in lines
    assert any(
        line.startswith("images, else partial 56 h") and line.endswith("one save in the whole job")
        for line in lines
    )
    assert lines[-2:] == [
        "cheapest: partial, a save every 44.8 h",
        "cheapest in this release: images, else partial, a save every 56 h",
    ]


def test_above_the_budget(console: Console) -> None:
    options = ["--nodes", 8, "--mtbf-hours", 224, "--job-hours", 56, "--max-pls", 0, *TIMES]
    result = console.run("plan", *options)
    assert result.out.count("above the budget") == 2
    assert "cheapest: full" in result.out


def test_failures_too_frequent_for_arithmetic(console: Console) -> None:
    options = ["--nodes", 8, "--mtbf-hours", 8, "--job-hours", 56, "--max-pls", 0.1, *TIMES]
    lines = console.run("plan", *options).out.splitlines()
    noted = [line.split()[0] for line in lines if "a lower bound" in line]
    assert noted == ["full", "naive", "partial"]  # 57.5 %, 29.8 %, 14.6 %
    options[3] = 80
    lines = console.run("plan", *options).out.splitlines()
    noted = [line.split()[0] for line in lines if "a lower bound" in line]
    assert noted == ["full"]  # 14.6 %, 7.5 %, 1.5 %
    found = console.json("plan", *options)["recovery"]["candidates"]
    assert [one["lower_bound"] for one in found] == [True, False, False]


def test_measured_times_come_from_the_log(console: Console, log: Path) -> None:
    result = console.run("plan", *CPR, "--log", log, "--json")
    assert "line 8, is incomplete and was skipped" in result.err
    figures = result.document["recovery"]["figures"]
    assert figures["save_seconds"] == {"value": 1.5, "source": "measured: mean of 2 checkpoints"}
    assert figures["durable_seconds"] == {"value": 6.0, "source": "measured: mean of 2 checkpoints"}
    assert figures["load_seconds"] == {"value": 15.0, "source": "measured: mean of 2 restores"}
    given = console.json("plan", *CPR, "--log", log, "--save-seconds", 4)["recovery"]["figures"]
    assert given["save_seconds"] == {"value": 4.0, "source": "given"}
    assert given["durable_seconds"]["value"] == 6.0


def test_without_measurements_the_sizes_count(console: Console) -> None:
    options = [*SIZES, "--read-bandwidth", 20, "--max-pls", 0.1]
    found = console.json("plan", *options)
    wanted = forecast(Job(rows=2_000_000_000, dim=128, read_bandwidth=20e9), "intermittent")
    figures = found["recovery"]["figures"]
    assert figures["save_seconds"]["value"] == wanted.mean_stall
    assert figures["load_seconds"]["value"] == wanted.longest_read
    assert figures["save_seconds"]["source"] == "computed: mean stall of intermittent"
    assert figures["durable_seconds"]["source"] == "assumed: when training goes on"
    plain = console.json("plan", *options[:-2])
    assert "recovery" not in plain
    assert {name: value for name, value in found.items() if name != "recovery"} == plain


def test_a_node_takes_all_its_ranks(console: Console) -> None:
    found = console.json("plan", *CPR, *TIMES, "--ranks", 60)["recovery"]
    assert (found["ranks"], found["lost_ranks"]) == (60, 8)  # 7.5 a node
    few = console.json("plan", *CPR, *TIMES, "--ranks", 3)["recovery"]
    assert (few["ranks"], few["lost_ranks"]) == (3, 1)


def test_images_cost_what_is_given(console: Console) -> None:
    options = [*CPR, *TIMES, "--process-deaths", 1, "--journal", 0]
    found = console.json("plan", *options)["recovery"]
    (images,) = (one for one in found["candidates"] if one["recovery"] == "images, else full")
    assert images["journal"] == images["lost"] == images["pls"] == 0
    assert found["best"]["recovery"] == "images, else full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing says how long a save is: give --save-seconds"),
        (["--save-seconds", "nan"], "save_seconds must be from 0 to 1e+18, not nan"),
        (["--save-seconds", "-1"], "save_seconds must be from 0"),
        (["--save-seconds", "0"], "save_seconds and durable_seconds are both 0"),
        (["--save-seconds", "1", "--max-pls", "nan"], "max_pls must be a portion from 0 to 1"),
        (["--save-seconds", "1", "--max-pls", "-0.1"], "max_pls must be a portion"),
        (["--save-seconds", "1", "--mtbf-hours", "0.1"], "it would make no progress"),
        (["--save-seconds", "1", "--mtbf-hours", "nan"], "mtbf_hours must be from 1e-09"),
        (["--save-seconds", "1", "--mtbf-hours", "1e-320"], "mtbf_hours must be from 1e-09"),
        (["--save-seconds", "1", "--job-hours", "1e-320"], "job_hours must be from 1e-09"),
        (["--save-seconds", "1", "--nodes", "0"], "nodes must be from 1 to 1e+18, not 0"),
        (["--save-seconds", "1", "--nodes", "9" * 400], "nodes must be from 1 to 1e+18"),
        (["--save-seconds", "1", "--ranks", "9" * 400], "ranks must be from 1 to 1e+18"),
        (["--save-seconds", "1", "--job-hours", "inf"], "job_hours must be from"),
        (["--save-seconds", "1e6"], "longer than the job of 72"),
        (["--save-seconds", "1", "--process-deaths", "2"], "process_deaths must be a share"),
        (["--save-seconds", "1", "--journal", "-1", "--process-deaths", "1"], "journal must be"),
        (["--save-seconds", "1", "--ranks", "0"], "ranks must be from 1"),
        (["--rows", "5"], "--dim is missing"),
        (["--dim", "5"], "--rows is missing"),
    ],
)
def test_mistakes_are_named(console: Console, arguments: list[str], message: str) -> None:
    result = console.run("plan", "--max-pls", "0.1", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--save-seconds", "--ranks", "--log", "--process-deaths"])
def test_an_option_without_effect_is_refused(console: Console, option: str) -> None:
    result = console.run("plan", *SIZES, option, 1)
    assert result.code == 2
    error = " ".join(result.err.replace("│", " ").split())
    assert f"{option} is for the choice of a recovery: give --max-pls as well" in error


def test_a_log_without_checkpoints(console: Console, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": "step"}\n')
    result = console.run("plan", *CPR, "--log", path)
    assert result.code == 2
    assert "log has no checkpoint: give --save-seconds" in " ".join(
        result.err.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "line 1, is no report of a checkpoint"),
        ('{"event": "restore"}\n', "line 1, is no report"),
        ('{"event": "checkpoint", "id": "a", "stall_seconds": -1}\n', "line 1, is no report"),
        ('{"event": "start", "restored": {"seconds": 1e400}}\n', "line 1, is no report"),
    ],
)
def test_a_log_of_something_else(
    console: Console, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "log"
    path.write_text(content)
    result = console.run("plan", *CPR, "--log", path)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
