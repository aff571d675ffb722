"""The trainer runs as its users run it: torchrun, real processes, and what they leave behind."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.dlrm_criteo.final_state import compare
from recipes.dlrm_criteo.job import Job, JobFailed
from tests.distributed.forked import Forked

STEPS, BATCH, RANKS = 60, 256, 2
EVAL_EVERY = 25
EVERY_STEPS = 10  # between checkpoints
SETTINGS = (
    f"trainer.steps={STEPS}",
    f"trainer.batch_size={BATCH}",
    "trainer.eval_samples=8192",
    "trainer.log_samples=true",
    f"checkpoint.every_steps={EVERY_STEPS}",
)


@dataclass
class Run:
    """A finished run."""

    directory: Path
    events: list[dict[str, Any]]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def final_state(self) -> Path:
        return self.directory / "final"


def train(
    directory: Path,
    *overrides: str,
    kill: tuple[int, int] | None = None,
    after: int = 0,
    ranks: int = RANKS,
) -> Run:
    """Run the trainer; with `kill=(step, rank)` that rank dies once that step is done, and the
    checkpoint of step `after` is told of.
    """
    settings = (*SETTINGS, f"trainer.final_state={directory / 'final'}", *overrides)
    events: list[dict[str, Any]] = []
    told = not after
    with Job(directory, settings, ranks=ranks, max_restarts=1 if kill else 0) as job:
        for event in job.events():
            events.append(event)
            told = told or (event["event"], event.get("step")) == ("checkpoint", after)
            if kill and told and event["event"] == "step" and event["step"] >= kill[0]:
                job.kill(kill[1])
                kill = None
    return Run(directory, events)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("train") / "run"
    return train(directory, f"trainer.eval_every={EVAL_EVERY}")


def test_every_step_is_told(run: Run) -> None:
    (start,) = run.named("start")
    assert (start["attempt"], start["restored"], start["samples"]) == (0, None, 0)
    assert len(set(start["pids"])) == RANKS
    steps = run.named("step")
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    assert [e["samples"] for e in steps] == [BATCH * e["step"] for e in steps]
    assert all(math.isfinite(e["loss"]) for e in steps)
    assert run.events[-1]["event"] == "end"
    assert (run.events[-1]["step"], run.events[-1]["samples"]) == (STEPS, STEPS * BATCH)


def test_the_model_learns(run: Run) -> None:
    scores = run.named("eval")
    assert [(e["step"], e["final"]) for e in scores] == [(25, False), (50, False), (STEPS, True)]
    assert {e["eval_samples"] for e in scores} == {8192}
    assert scores[-1]["auc"] > 0.68  # 0.75 when this was written; 0.5 is guessing
    assert scores[-1]["logloss"] < scores[0]["logloss"]


def test_ranks_share_one_directory(run: Run) -> None:
    assert sorted(path.name for path in run.directory.iterdir()) == [
        "config.yaml",
        "final",
        "output.log",
        "samples-rank0.jsonl",
        "samples-rank1.jsonl",
        "tensorboard",
        "train.jsonl",
    ]
    assert OmegaConf.load(run.directory / "config.yaml").trainer.steps == STEPS
    assert "Traceback" not in (run.directory / "output.log").read_text()


def test_tensorboard_has_the_curves(run: Run) -> None:
    scalars = EventAccumulator(str(run.directory / "tensorboard")).Reload()
    assert [e.step for e in scalars.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert scalars.Scalars("train/samples_per_second")[-1].value > 0
    auc = scalars.Scalars("eval/auc")[-1]
    assert (auc.step, auc.value) == (STEPS, pytest.approx(run.named("eval")[-1]["auc"]))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(run: Run, tmp_path: Path) -> None:
    again = train(tmp_path / "again", f"trainer.eval_every={EVAL_EVERY}")
    result = compare(run.final_state, again.final_state)
    assert result.equal, result.differences
    assert (result.tables, result.dense_tensors) == (26, 36)
    assert result.rows > 100_000
    assert again.named("step") == run.named("step")
    assert again.named("eval") == run.named("eval")


@pytest.mark.slow
def test_plan_and_pipeline_change_no_bit(run: Run, tmp_path: Path) -> None:
    """Compare the GPUs' pipeline, with evaluations at other steps and another plan."""
    other = train(
        tmp_path / "other",
        "sharding=table_wise",
        "trainer.pipeline=sparse_dist",
        "trainer.eval_every=7",
    )
    result = compare(run.final_state, other.final_state)
    assert result.equal, result.differences
    assert [e["step"] for e in other.named("eval")] == [*range(7, STEPS, 7), STEPS]


def trained_samples(run: Run, ranks: int = RANKS) -> Iterable[int]:
    """Return the samples of the steps that led to the end, without those undone by a restart."""
    resumed = {start["attempt"]: start["step"] for start in run.named("start")}
    for rank in range(ranks):
        for line in read_lines(run.directory / f"samples-rank{rank}.jsonl"):
            later = [step for attempt, step in resumed.items() if attempt > line["attempt"]]
            if not later or line["step"] <= min(later):
                yield from range(line["first"], line["first"] + line["count"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow  # tests/crash has kills of this recipe that are always run
def test_a_killed_rank_costs_no_sample_and_no_bit(run: Run, tmp_path: Path) -> None:
    """Include the batches that the pipeline had read when the rank died."""
    killed = train(
        tmp_path / "killed",
        "checkpoint=check_n_run",
        "checkpoint.when_busy=wait",  # on a busy machine, too, each is begun
        "trainer.pipeline=sparse_dist",
        kill=(25, 0),
        after=20,
    )
    first, second = killed.named("start")
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert not set(first["pids"]) & set(second["pids"])
    step = second["step"]
    assert step in (20, 30)  # it may take until then to hear of the one of step 20
    assert second["restored"]["step"] == step
    assert second["samples"] == step * BATCH
    assert sorted(trained_samples(killed)) == list(range(STEPS * BATCH))
    result = compare(run.final_state, killed.final_state)
    assert result.equal, result.differences
    # The killed rank may have died before it told of the last one, which was restored.
    checkpoints = [e["step"] for e in killed.named("checkpoint")]
    assert sorted({*checkpoints, step}) == [10, 20, 30, 40, 50, 60]
    assert checkpoints == sorted(set(checkpoints))  # each once, in order


@pytest.mark.slow
def test_a_restart_without_checkpoints_begins_again(run: Run, tmp_path: Path) -> None:
    again = train(tmp_path / "again", "checkpoint=off", kill=(5, 1))
    assert [(e["attempt"], e["samples"]) for e in again.named("start")] == [(0, 0), (1, 0)]
    assert compare(run.final_state, again.final_state).equal


@pytest.mark.slow
def test_more_ranks_resume_to_the_same_bits(tmp_path: Path) -> None:
    """Add more than two gradients in an order that a restart must not change."""
    settings = ("trainer.batch_size=240", "checkpoint=check_n_run")
    whole = train(tmp_path / "whole", *settings, ranks=4)
    killed = train(tmp_path / "killed", *settings, kill=(25, 2), ranks=4)
    assert [e["step"] for e in killed.named("start")] == [0, 20]
    result = compare(whole.final_state, killed.final_state)
    assert result.equal, result.differences
    assert sorted(trained_samples(killed, ranks=4)) == list(range(STEPS * 240))


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    """Stop where the dataset ends, and go on from the last checkpoint at a second start."""
    command = [
        *("recipes.dlrm_criteo.train", f"run_dir={tmp_path / 'run'}"),
        *("checkpoint=check_n_run", "checkpoint.every_steps=2", "checkpoint.at_end=true"),
        *("dataset.samples=150", "dataset.holdout_every=0", "optimizer=sgd"),
        "trainer.batch_size=32",
    ]
    for _ in range(2):
        log = tmp_path / "log"
        assert Forked(*command, log=log).wait(240) == 0, log.read_text()
    events = Run(tmp_path / "run", read_lines(tmp_path / "run" / "train.jsonl"))
    assert [e["step"] for e in events.named("start")] == [0, 4]
    assert [e["step"] for e in events.named("step")] == [1, 2, 3, 4]
    assert not events.named("eval")  # nothing is held out
    assert [e["samples"] for e in events.named("end")] == [128, 128]


@pytest.mark.slow  # lines are refused by name in tests/unit/recipes, lost ranks are in tests/crash
def test_a_failing_rank_ends_the_job_at_once(tmp_path: Path) -> None:
    """Fail on a line that only rank 1 meets: nobody waits, and its error is told."""
    good = "\t".join(["1", *["3"] * 13, *["a1b2c3d4"] * 26])
    lines = [good] * 96
    lines[60] = good.replace("a1b2c3d4", "no-hex", 1)
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    began = time.monotonic()
    with pytest.raises(JobFailed, match="exit status 1"):
        train(
            tmp_path / "run",
            *("dataset=criteo_tsv", f"dataset.path={tmp_path / 'train.txt'}"),
            *("dataset.holdout_every=0", "trainer.batch_size=16", "trainer.eval_samples=0"),
        )
    assert time.monotonic() - began < 200
    output = (tmp_path / "run" / "output.log").read_text()
    assert "train.txt" in output
    assert ":61" in output or "line 61" in output
