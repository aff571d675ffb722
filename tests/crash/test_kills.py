"""Ten kills in one run, wherever they fall, change nothing in its end.

Every kill is a SIGKILL to a real torchrun worker, by another process after a random time or by the
worker itself at a point inside a save or restore. `CHECKNRUN_KILL_SEED` repeats the kills of a run;
those from outside then fall on the same steps, if not on the same instruction.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.dlrm_criteo import demo
from recipes.dlrm_criteo.final_state import compare
from recipes.dlrm_criteo.job import Job, is_alive
from tests.crash import kills
from tests.crash.kills import Kill
from torchrec_checknrun.format.rank_file import MAGIC
from torchrec_checknrun.tools.verify import verify

INTERVAL = 6
STEPS = 120
"""More than the kills need: an attempt dies in its first two intervals or soon after."""
OVERRIDES = (
    "dataset=synthetic",
    "dataset.samples=100_000",
    "trainer.batch_size=256",
    "trainer.eval_samples=256",
    "trainer.log_samples=true",
    f"trainer.steps={STEPS}",
    "checkpoint=check_n_run",
    f"checkpoint.every_steps={INTERVAL}",
    "checkpoint.keep=null",  # what the kills leave is looked at in the end
)


@pytest.fixture
def seed(capsys: pytest.CaptureFixture[str]) -> int:
    """Draw another seed each time, unless the environment has one."""
    value = int(os.environ.get("CHECKNRUN_KILL_SEED") or random.SystemRandom().getrandbits(32))
    with capsys.disabled():
        print(f"\nkills drawn with CHECKNRUN_KILL_SEED={value}", flush=True)
    return value


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> demo.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[2])
        return train_uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


def train_uninterrupted(directory: Path, overrides: tuple[str, ...] = ()) -> demo.Run:
    run = demo.Run(directory)
    settings = [*OVERRIDES, *overrides, f"trainer.final_state={run.final_state}"]
    with Job(directory, [*settings, "checkpoint.every_steps=1000000"]) as job:
        run.starts = [event for event in job.events() if event["event"] == "start"]
    return run


@pytest.mark.slow  # always run: the demo's kill, and those of tests/campaign
@pytest.mark.timeout(900)
def test_ten_kills(seed: int, uninterrupted: demo.Run, tmp_path: Path) -> None:
    planned = kills.draw(seed, INTERVAL)
    assert len(planned) == 10
    be_killed("consecutive", (), planned, uninterrupted, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_with_one_shot(seed: int, uninterrupted: demo.Run, tmp_path: Path) -> None:
    be_killed("one_shot", (), kills.draw(seed, INTERVAL)[:5], uninterrupted, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [("sharding=table_wise",), ("trainer.pipeline=sparse_dist",), ("checkpoint.policy=one_shot",)],
    ids=" ".join,
)
def test_ten_kills_of_other_jobs(overrides: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    uninterrupted = train_uninterrupted(tmp_path / "uninterrupted", overrides)
    be_killed(
        "consecutive", overrides, kills.draw(seed, INTERVAL), uninterrupted, tmp_path / "killed"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_phase_on_each_rank_and_on_both(uninterrupted: demo.Run, tmp_path: Path) -> None:
    """Sweep with retention: what is left over is cleared away meanwhile."""
    assert not sweep_kills(uninterrupted, tmp_path)


def sweep_kills(uninterrupted: demo.Run, directory: Path) -> list[str]:
    """Run the job through a kill in every phase; return what was lost."""
    run, lost = sweep_phases(directory)
    return lost + compare(uninterrupted.final_state, run.final_state).differences


def sweep_phases(directory: Path, overrides: tuple[str, ...] = ()) -> tuple[demo.Run, list[str]]:
    """Run a job through a kill in every phase; return it, and what was lost on the way."""
    planned, settings = kills.sweep(), ("checkpoint.keep=2", *overrides)
    run, killed = train_under_fire("consecutive", settings, planned, directory)
    lost = [f"no kill {kill}" for i, kill in enumerate(planned) if i not in killed]
    alive = [pid for event in killed.values() for pid in event["pids"] if is_alive(pid)]
    lost += [f"process {pid} outlived its kill" for pid in alive]
    lines = (directory / "restores.jsonl").read_text().splitlines()
    newest = {entry["attempt"]: entry["newest"] for entry in map(json.loads, lines)}
    for start in run.starts:
        restored = start["restored"]["id"] if start["restored"] else None
        if restored != newest[start["attempt"]]:
            lost.append(f"{newest[start['attempt']]} was the newest, {restored} was restored")
    samples = demo.check_samples(run)
    if samples != STEPS * 256:
        lost.append(f"{samples} samples instead of {STEPS * 256}")
    for found in verify(directory / "checkpoints"):
        lost += found.problems
    return run, lost


def be_killed(
    policy: str,
    overrides: tuple[str, ...],
    planned: list[Kill],
    uninterrupted: demo.Run,
    directory: Path,
) -> None:
    """Run the job through all kills, and check all outcomes."""
    print(*planned, sep="\n")
    run, killed = train_under_fire(policy, overrides, planned, directory)
    check_killed(run, planned, killed)
    check_restored(run, planned, killed)
    assert demo.check_samples(run) == demo.check_samples(uninterrupted) == STEPS * 256
    demo.check_bytes(run)
    result = compare(uninterrupted.final_state, run.final_state)
    assert result.equal, result.differences


def train_under_fire(
    policy: str, overrides: tuple[str, ...], planned: list[Kill], directory: Path
) -> tuple[demo.Run, dict[int, dict[str, Any]]]:
    """Run the job; return it, and by attempt what its killer says."""
    kills.write_plan(directory, planned)
    (directory / "killed.jsonl").touch()  # by those who kill themselves: perhaps by none
    run = demo.Run(directory)
    settings = [*OVERRIDES, f"checkpoint.policy={policy}", *overrides]
    settings.append(f"trainer.final_state={run.final_state}")
    killed: dict[int, dict[str, Any]] = {}
    with Job(
        directory, settings, max_restarts=len(planned), module="tests.crash.kill_in_save"
    ) as job:
        for event in job.events():
            if event["event"] == "start":
                run.starts.append(event)
            elif event["event"] == "checkpoint":
                run.checkpoints.append(event)
            elif event["event"] == "step":
                start = run.starts[-1]
                attempt = start["attempt"]
                if attempt in killed or attempt >= len(planned):
                    continue
                kill = planned[attempt]
                following = [after.point for after in planned[attempt + 1 : attempt + 2]]
                if following == [kills.IN_RESTORE] and not run.checkpoints:
                    continue  # on a busy machine the first one may not be committed yet
                if kill.point == kills.OUTSIDE and event["step"] >= start["step"] + kill.steps:
                    time.sleep(kill.delay)
                    killed[attempt] = {"attempt": attempt, "pid": job.kill(kill.rank)}
    for line in (directory / "killed.jsonl").read_text().splitlines():
        entry = json.loads(line)
        killed[entry["attempt"]] = entry
    return run, killed


def check_killed(run: demo.Run, planned: list[Kill], killed: dict[int, dict[str, Any]]) -> None:
    """Assert that every planned kill took place, ended that process, and cost one restart."""
    assert sorted(killed) == list(range(len(planned)))
    starts = {start["attempt"]: start for start in run.starts}
    never_started = {i for i, kill in enumerate(planned) if kill.point == kills.IN_RESTORE}
    assert starts.keys() == set(range(len(planned) + 1)) - never_started
    assert len({pid for start in run.starts for pid in start["pids"]}) == 2 * len(starts)
    for attempt, kill in enumerate(planned):
        pid = killed[attempt]["pid"]
        assert not is_alive(pid), kill
        assert attempt in never_started or starts[attempt]["pids"][kill.rank] == pid, kill


def check_restored(run: demo.Run, planned: list[Kill], killed: dict[int, dict[str, Any]]) -> None:
    """Assert that each attempt went on from the newest checkpoint with a manifest alone."""
    lines = (run.directory / "restores.jsonl").read_text().splitlines()
    newest = {entry["attempt"]: entry["newest"] for entry in map(json.loads, lines)}
    restored = {
        start["attempt"]: start["restored"]["id"] if start["restored"] else None
        for start in run.starts
    }
    assert restored == {attempt: newest[attempt] for attempt in restored}

    root = run.directory / "checkpoints"
    for attempt, kill in enumerate(planned):
        if kill.point in kills.UNCOMMITTED:
            check_left_over(root / killed[attempt]["checkpoint"], kill)
            assert newest[attempt + 1] != killed[attempt]["checkpoint"]
        elif kill.point == kills.AFTER_MANIFEST:
            assert newest[attempt + 1] == killed[attempt]["checkpoint"]
    folders = [path for path in root.iterdir() if path.name != "writers"]
    left_over = {path.name for path in folders if not (path / "manifest.json").exists()}
    chains = [start["restored"]["chain"] for start in run.starts if start["restored"]]
    assert left_over.isdisjoint(name for chain in chains for name in chain)
    sequences = [path.name.split("_")[0] for path in folders]
    assert len(set(sequences)) == len(sequences), "a sequence number was used again"


def check_left_over(folder: Path, kill: Kill) -> None:
    """Assert that the files are as they were at the planned point of the kill."""
    assert not (folder / "manifest.json").exists()
    own = folder / f"rank-{kill.rank:05d}.bin"
    if kill.point == kills.BEFORE_FILES:
        assert not own.exists()
    elif kill.point == kills.IN_FILE:
        assert own.stat().st_size > 0
        assert not is_whole(own)
    elif kill.point == kills.AFTER_FILE:
        assert is_whole(own)
    else:
        files = list(folder.glob("rank-*.bin"))
        assert len(files) == kills.RANKS
        assert all(is_whole(file) for file in files)
        temporary = list(folder.glob(".manifest.json.*"))
        assert len(temporary) == (kill.point == kills.IN_MANIFEST)


def is_whole(file: Path) -> bool:
    return file.read_bytes().endswith(MAGIC)
