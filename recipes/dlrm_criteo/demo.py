"""Show the main job: kill a rank, resume training, and reach the state of an uninterrupted run.

    python -m recipes.dlrm_criteo.demo [--data train.txt] [--bits 8] [--once]

Four runs of the trainer, each in processes of its own: two that are never interrupted (they show
that the job is reproducible; one with `--once`), and two that lose a rank to SIGKILL in the middle
of backward and are restarted by torchrun: from the newest checkpoint, and from images in shared
memory. Every claim is checked; the last line is `DEMO OK` with the figures, or the command fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from recipes.dlrm_criteo.final_state import compare
from recipes.dlrm_criteo.job import Event, Job, JobFailed, cleared, is_alive
from recipes.dlrm_criteo.killed_in_backward import KILLED_RANK, REQUEST
from torchrec_checknrun.format.names import sequence_of

TRAINER = "recipes.dlrm_criteo.train"
KILLED_IN_BACKWARD = "recipes.dlrm_criteo.killed_in_backward"
RUNS = ("uninterrupted", "uninterrupted-again", "killed", "killed-with-images")
"""The runs, each a folder of its name."""
UNINTERRUPTED, AGAIN, KILLED, WITH_IMAGES = RUNS
SHARED_MEMORY, LEAST_SHARED_MEMORY = "/dev/shm", 1 << 30
"""The folder of images, and the bytes free there below which the run with images is left out."""


@dataclass(frozen=True)
class Plan:
    """The lengths of the runs, and the step of the kill: between two checkpoints."""

    steps: int
    interval: int
    kill_at: int
    overrides: tuple[str, ...]


SYNTHETIC = Plan(
    steps=110,
    interval=20,
    kill_at=70,
    overrides=("dataset=synthetic", "dataset.samples=200_000", "trainer.batch_size=1024"),
)
# A small file is read repeatedly; its few different ids need only small tables.
TSV = Plan(
    steps=66,
    interval=12,
    kill_at=42,
    overrides=(
        "dataset=criteo_tsv",
        "dataset.epochs=1000",
        "model.scale=0.0005",
        "trainer.batch_size=64",
        "trainer.eval_samples=128",
    ),
)


@dataclass
class Run:
    """The observations of a run."""

    directory: Path
    checkpoints: list[Event] = field(default_factory=list)
    starts: list[Event] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    killed_pid: int | None = None
    step_at_kill: int = 0

    @property
    def final_state(self) -> Path:
        return self.directory / "final"

    @property
    def steps_lost(self) -> int:
        """Return the number of whole steps before the kill that were trained again."""
        restored: int = self.starts[1]["restored"]["step"]
        return self.step_at_kill - 1 - restored


class Unmet(AssertionError):
    """A claim of the demo doesn't hold."""


def check(holds: bool, claim: str) -> None:
    """Raise `Unmet` unless a claim holds."""
    if not holds:
        raise Unmet(claim)


def train(name: str, root: Path, plan: Plan, overrides: list[str], module: str, kill: bool) -> Run:
    """Run the job to its end; with `kill`, kill one rank on the way."""
    run = Run(root / name)
    settings = [
        *plan.overrides,
        f"trainer.steps={plan.steps}",
        "trainer.log_samples=true",
        f"trainer.final_state={run.final_state}",
        "checkpoint=check_n_run",
        "checkpoint.policy=consecutive",
        f"checkpoint.every_steps={plan.interval}",
        # Steps are so short that a checkpoint may be unfinished when the next is due.
        "checkpoint.when_busy=wait",
        "checkpoint.keep=null",  # all are compared with the store at the end
        *overrides,
    ]
    bar = tqdm(total=plan.steps, desc=name, unit="step", file=sys.stderr)
    with bar, Job(run.directory, settings, max_restarts=1 if kill else 0, module=module) as job:
        for event in job.events():
            what = event["event"]
            if what == "start":
                run.starts.append(event)
            elif what == "checkpoint":
                run.checkpoints.append(event)
            elif what == "eval":
                run.evaluations.append(event)
            elif what == "step":
                bar.update(event["step"] - bar.n)
                if len(run.starts) == 1:
                    # Applies to events read after the kill, too: the worker may have logged them
                    # before.
                    run.step_at_kill = event["step"] + 1
                differential = [c for c in run.checkpoints if c["kind"] == "differential"]
                due = event["step"] >= plan.kill_at and len(differential) >= 2
                if kill and run.killed_pid is None and due:
                    run.killed_pid = run.starts[0]["pids"][KILLED_RANK]
                    if module == KILLED_IN_BACKWARD:
                        (run.directory / REQUEST).touch()
                    else:
                        job.kill(KILLED_RANK)
                    bar.write(
                        f"SIGKILL to rank {KILLED_RANK} (pid {run.killed_pid}) after step "
                        f"{event['step']}; torchrun restarts the workers",
                        file=sys.stderr,
                    )
    return run


def check_resumed(run: Run) -> None:
    """Check that the kill was real, and that training resumed from an earlier checkpoint."""
    assert run.killed_pid is not None
    deadline = time.monotonic() + 10
    while is_alive(run.killed_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    check(not is_alive(run.killed_pid), f"the killed process {run.killed_pid} is gone")
    check(len(run.starts) == 2, f"the workers started twice, not {len(run.starts)} times")
    first, second = run.starts
    check(first["restored"] is None, "the first attempt began at the beginning")
    check(second["restored"] is not None, "the second attempt restored a checkpoint")
    check(run.killed_pid in first["pids"], "the killed process was a worker of the first attempt")
    check(run.killed_pid not in second["pids"], "and none of the second's")
    restored = second["restored"]
    check(
        0 < restored["step"] < run.step_at_kill,
        f"the restored step {restored['step']} lies before the kill in step {run.step_at_kill}",
    )
    kinds = [event["kind"] for event in run.checkpoints if event["id"] in restored["chain"]]
    check(
        kinds[:1] == ["full"] and kinds.count("differential") >= 2,
        f"the chain {kinds} has a baseline and two differentials",
    )


def check_samples(run: Run) -> int:
    """Check that no sample was lost or trained twice over all attempts; return the number trained.

    Training beyond the step from which a later attempt resumed does not count.
    """
    # By attempt: one that died before restoring has no start, and trained nothing.
    kept_until: dict[int, int] = {}
    resumed_from = sys.maxsize
    for start in reversed(run.starts):
        kept_until[start["attempt"]] = resumed_from
        resumed_from = min(resumed_from, start["step"])
    spans: dict[int, list[tuple[int, int]]] = {}
    for path in sorted(run.directory.glob("samples-rank*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["step"] <= kept_until[entry["attempt"]]:
                span = (entry["first"], entry["first"] + entry["count"])
                spans.setdefault(entry["step"], []).append(span)
    position = 0
    for step in range(1, max(spans) + 1):
        for first, last in sorted(spans.get(step, [])):
            check(first == position, f"step {step} goes on at sample {position}, not {first}")
            position = last
    return position


def check_bytes(run: Run) -> None:
    """Check the reported bytes against a listing of the store."""
    for event in run.checkpoints:
        folder = run.directory / "checkpoints" / event["id"]
        listed = sum(path.stat().st_size for path in folder.iterdir())
        check(
            listed == event["total_bytes"],
            f"{event['id']}: {event['total_bytes']} bytes reported, {listed} in the store",
        )


def table(run: Run) -> Table:
    """Make a table of the costs of a run's checkpoints."""
    result = Table(title=f"checkpoints of {run.directory}", title_justify="left")
    for name in ("step", "seq", "kind", "parent", "modified", "tables+ids", "dense", "manifest"):
        result.add_column(name, justify="left" if name in ("kind", "parent") else "right")
    for name in ("total bytes", "of full fp32", "stall ms"):
        result.add_column(name, justify="right")
    for event in run.checkpoints:
        stored = event["bytes"]
        tables = stored["weights"] + stored["ids"] + stored["optimizer"]
        result.add_row(
            str(event["step"]),
            str(event["sequence"]),
            event["kind"],
            # By its name: the report of a checkpoint that was committed just before a kill is lost.
            f"seq {sequence_of(event['parent'])}" if event["parent"] else "-",
            f"{event['modified_fraction']:.1%}",
            f"{tables:,}",
            f"{stored['dense']:,}",
            f"{stored['manifest'] + stored['other']:,}",
            f"{event['total_bytes']:,}",
            f"{event['total_bytes'] / event['full_fp32_bytes']:.1%}",
            f"{event['stall_seconds'] * 1e3:.1f}",
        )
    result.caption = "manifest: with the rank files' chunk indexes. stall: on rank 0."
    return result


def demonstrate(
    root: Path, plan: Plan, overrides: list[str], sabotaged: str | None, exact: bool, once: bool
) -> str:
    """Make all runs and check every claim; return the figures for the last line."""
    console = Console(width=140)
    module = sabotaged or TRAINER
    first = train(UNINTERRUPTED, root, plan, overrides, module, kill=False)
    if exact and not once:
        second = train(AGAIN, root, plan, overrides, module, kill=False)
        same = compare(first.final_state, second.final_state)
        check(same.equal, f"two uninterrupted runs are equal, but: {same.differences}")
        console.print("two uninterrupted runs end bit for bit equal")
    module = sabotaged or KILLED_IN_BACKWARD
    killed = train(KILLED, root, plan, overrides, module, kill=True)
    console.print(table(killed))
    figures = check_runs(first, killed, exact)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < LEAST_SHARED_MEMORY:
        return f"{figures} (not shown with images: {SHARED_MEMORY} has {free / 1e6:,.0f} MB free)"
    images = [*overrides, "checkpoint.images=true"]
    survived = train(WITH_IMAGES, root, plan, images, module, kill=True)
    return f"{check_images(first, survived)}; without images: {figures}"


def check_images(first: Run, survived: Run) -> str:
    """Check the killed run that had images, and compare its end; return the figures.

    The run read nothing from quantized rows, so its end is exact in any case.
    """
    check_resumed(survived)
    restored = survived.starts[1]["restored"]
    check(
        restored["source"] == "images",
        f"the second attempt went on from images, not from {restored['source']}: "
        f"{restored['without_images']}",
    )
    lost = survived.steps_lost
    check(lost == 0, f"no step was lost, but {lost}: resumed from step {restored['step']}")
    check(check_samples(survived) == check_samples(first), "both runs trained the same samples")
    result = compare(first.final_state, survived.final_state)
    check(result.equal, f"the run with images ends where the others do: {result.differences}")
    return f"with images: killed in step {survived.step_at_kill}, {lost} steps lost"


def check_runs(first: Run, killed: Run, exact: bool) -> str:
    """Check the killed run, and compare its end with the uninterrupted one; return the figures."""
    check_resumed(killed)
    trained = check_samples(killed)
    check(trained == check_samples(first), "both runs trained the same samples")
    for run in (first, killed):
        check_bytes(run)
    fractions = [
        event["modified_fraction"] for event in killed.checkpoints if event["kind"] != "full"
    ]
    check(
        all(0.05 <= fraction <= 0.6 for fraction in fractions),
        f"every interval modifies between 5 and 60 % of the rows: {fractions}",
    )
    restored = killed.starts[1]["restored"]
    figures = (
        f"killed in step {killed.step_at_kill}, {killed.steps_lost} steps lost (resumed from step "
        f"{restored['step']}), "
        f"{trained} samples, none lost or repeated; differentials "
        f"{min(fractions):.1%} to {max(fractions):.1%} of the rows; "
    )
    result = compare(first.final_state, killed.final_state)
    if exact:
        check(result.equal, f"the resumed run ends where the others do, but: {result.differences}")
        return figures + (
            f"{result.rows} rows of {result.tables} tables with their optimizer state and "
            f"{result.dense_tensors} dense tensors equal bit for bit"
        )
    scores = [run.evaluations[-1]["logloss"] for run in (first, killed)]
    return figures + f"logloss {scores[0]:.5f} uninterrupted, {scores[1]:.5f} resumed (lossy)"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.dlrm_criteo.demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="a Criteo TSV file; synthetic data without it")
    parser.add_argument("--bits", type=int, choices=(8, 4, 3, 2), help="quantize; exact without it")
    parser.add_argument(
        "--once",
        action="store_true",
        help="one uninterrupted run: that the killed ones end as it did shows enough",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="where to write")
    parser.add_argument("--module", help="another trainer (tests sabotage it)")
    options = parser.parse_args(arguments)
    plan, overrides = SYNTHETIC, []
    if options.data is not None:
        if not options.data.is_file():
            parser.error(f"--data {options.data}: no such file")
        plan, overrides = TSV, [f"dataset.path={options.data.resolve()}"]
    if options.bits is not None:
        overrides.append(f"checkpoint.bits={options.bits}")
    root = cleared(options.runs.resolve(), RUNS)
    try:
        exact = options.bits is None
        figures = demonstrate(root, plan, overrides, options.module, exact, options.once)
    except (Unmet, JobFailed) as error:
        print(f"DEMO FAILED: {error}", file=sys.stderr)
        return 1
    print(f"DEMO OK: {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
