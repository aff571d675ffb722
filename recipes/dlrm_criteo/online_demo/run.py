"""Run the demo: a stream is predicted by three models, then trained on, while one of them follows.

Samples arrive at a fixed rate, a batch at a time. Each batch is first predicted, by

- the *followed* model, in a server of its own process, which follows the run's publications,
- one that stays at the *first checkpoint*, and one that is *reloaded* from each whole checkpoint,
  both in this process,

and only then is the trainer's gate opened for it. So no prediction can be of a version that has
seen the sample: it did not leave the gate until all three had answered. ``check_answers`` checks
that again afterwards, by the trainer's own count of samples at the step of each version.

The stream begins with a warm-up that is trained and not predicted, until there is a first
publication and a first checkpoint. If training falls behind, the stream waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.dlrm_criteo.demo import check
from recipes.dlrm_criteo.gate import Gate
from recipes.dlrm_criteo.job import Job, is_alive
from recipes.dlrm_criteo.model import Architecture
from recipes.dlrm_criteo.online_demo import outcome
from recipes.dlrm_criteo.online_demo.outcome import FIRST, FOLLOWED, RELOADED, Question, Versions
from recipes.dlrm_criteo.online_demo.reloads import Reloads
from recipes.dlrm_criteo.online_demo.served import Server
from recipes.dlrm_criteo.online_demo.watch import Moment, Watch
from recipes.dlrm_criteo.samples import ChunkedDataset
from recipes.dlrm_criteo.synthetic import Synthetic

RANKS = 2
WRITTEN = ("gate", "publications", "server", "trainer")
"""The names of what a demo writes into its folder."""
BACKLOG = 8
"""Batches that may be predicted and not yet trained; then the stream waits. TorchRec's pipelines
hold one or two of them, which they train when the next one comes."""
SERVED = ("interval_seconds=0.25",)
"""Overrides of the server, which is to show a publication soon."""
PATIENCE_SECONDS = 180.0
"""The longest wait for a start, a first version, an end; and of the trainer at the gate."""
_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Plan:
    """The sizes of a run.

    Attributes:
        batch: samples of a training step, and of a question.
        per_second: batches that arrive in a second.
        seconds: of the stream that is predicted.
        warm_up: batches that are trained before, at least; also the steps between checkpoints.
        publish_seconds: between two publications.
        overrides: of the trainer: its data and its model.
    """

    batch: int
    per_second: float
    seconds: float
    warm_up: int
    publish_seconds: float
    overrides: tuple[str, ...]

    @property
    def batches(self) -> int:
        """Return the batches to be predicted."""
        return max(1, round(self.seconds * self.per_second))


@dataclass
class Demo:
    """One run of the demo, with its processes."""

    plan: Plan
    job: Job
    server: Server
    watch: Watch
    reloads: Reloads
    gate: Gate
    dataset: ChunkedDataset
    released: int = 0
    questions: list[Question] = field(default_factory=list)
    began: float = 0.0

    def warm_up(self) -> None:
        """Train the beginning of the stream, until every model has a version."""
        self._release(self.plan.warm_up * self.plan.batch)
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._keep_up()
        while not (self.watch.seen and self.reloads.loaded):
            check(time.monotonic() < deadline, "there are a publication and a checkpoint")
            self._release(self.released + self.plan.batch)
            self._keep_up()
            time.sleep(1 / self.plan.per_second)

    def stream(self) -> Iterator[Question]:
        """Predict, then release, batch by batch, as they arrive."""
        batch = self.plan.batch
        first_model = self.reloads.loaded[0]
        self.began, start = time.time(), time.monotonic()
        samples_of = self.dataset.read(self.released, batch, 0, 1)
        for number in range(self.plan.batches):
            due = start + number / self.plan.per_second
            time.sleep(max(0.0, due - time.monotonic()))
            samples = next(samples_of, None)
            if samples is None:
                return
            answers = {
                FOLLOWED: self.server.predict(samples),
                FIRST: first_model.predict(samples),
                RELOADED: self.reloads.newest.predict(samples),
            }
            question = Question(self.released, samples.labels, answers, self._truth())
            self.questions.append(question)
            self._release(self.released + batch)
            yield question
            self._keep_up()

    def end(self) -> None:
        """Let training end, and wait for it."""
        self.gate.open_to(self.released, closed=True)
        self._wait(self.watch.trained.is_set)
        trained = self.watch.trained_samples
        check(trained == self.released, f"{trained} of {self.released} samples were trained")

    def result(self) -> dict[str, Any]:
        """Check every answer, and return the figures."""
        watch, loaded = self.watch, self.reloads.loaded
        reads = [seen.bytes_read for seen in watch.seen.values()]
        versions = {
            FOLLOWED: Versions(
                [Moment(seen.step, seen.time) for seen in watch.seen.values()],
                sum(reads),
                watch.publications,
            ),
            FIRST: Versions([], loaded[0].bytes_read, watch.checkpoints, follows=False),
            RELOADED: Versions(
                [Moment(whole.step, whole.shown) for whole in loaded],
                sum(whole.bytes_read for whole in loaded),
                watch.checkpoints,
            ),
        }
        check(bool(self.questions), "the stream has samples after its warm-up")
        outcome.check_answers(self.questions, versions, watch.samples.get)
        return outcome.measure(self.questions, versions, watch.steps, self.began)

    def _truth(self) -> np.ndarray | None:
        """Return the probabilities of the next batch, where they are known."""
        if not isinstance(self.dataset, Synthetic):
            return None
        return self.dataset.probability(np.arange(self.released, self.released + self.plan.batch))

    def _release(self, samples: int) -> None:
        self.gate.open_to(samples)
        self.released = samples

    def _keep_up(self) -> None:
        """Wait until training is near enough to the gate."""
        least = self.released - BACKLOG * self.plan.batch
        self._wait(lambda: self.watch.trained_samples >= least)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for the trainer.

        Raises:
            JobFailed, ServerFailed, CheckNRunError: a process or a thread has ended.
            Unmet: it took too long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.watch.check()
            if self.reloads.error is not None:
                raise self.reloads.error
            if until():
                return
            check(time.monotonic() < deadline, "training goes on: see trainer/output.log")
            time.sleep(_POLL_SECONDS)


def settings(root: Path, plan: Plan) -> list[str]:
    """Return the trainer's overrides."""
    return [
        *plan.overrides,
        "dataset.holdout_every=0",
        f"trainer.batch_size={plan.batch}",
        f"trainer.gate={root / 'gate'}",
        f"trainer.timeout_seconds={PATIENCE_SECONDS:g}",
        "checkpoint=check_n_run",
        "checkpoint.policy=full",
        f"checkpoint.every_steps={plan.warm_up}",
        f"checkpoint.publish_root={root / 'publications'}",
        f"checkpoint.publish_every_seconds={plan.publish_seconds:g}",
    ]


def demonstrate(root: Path, plan: Plan, quiet: bool = False) -> dict[str, Any]:
    """Run the demo in a folder without any of ``WRITTEN``; return its figures.

    Raises:
        Unmet: a promise does not hold.
        JobFailed, ServerFailed: a process failed.
    """
    publications, trainer = root / "publications", root / "trainer"
    with ExitStack() as stack:
        job = stack.enter_context(Job(trainer, settings(root, plan), ranks=RANKS))
        model = [override for override in plan.overrides if override.startswith("model")]
        served = Server(root / "server", [*model, f"root={publications}", *SERVED])
        server = stack.enter_context(served)
        watch = Watch(job, publications, trainer / "checkpoints", server)
        stack.callback(watch.close)
        config = _config(trainer, watch)
        architecture: Architecture = instantiate(config.model)
        dataset: ChunkedDataset = instantiate(
            config.dataset,
            num_embeddings_per_feature=architecture.num_embeddings_per_feature,
            _convert_="all",
        )
        reloads = Reloads(trainer / "checkpoints", architecture)
        stack.callback(reloads.close)
        demo = Demo(plan, job, server, watch, reloads, Gate(root / "gate"), dataset)
        demo.warm_up()
        bar = stack.enter_context(
            tqdm(total=plan.batches, desc="stream", unit="batch", disable=quiet)
        )
        for question in demo.stream():
            answers = question.answers
            bar.set_postfix_str(
                f"trained {watch.steps[-1].step}, followed {answers[FOLLOWED].step}, "
                f"reloaded {answers[RELOADED].step}",
                refresh=False,
            )
            bar.update()
        demo.end()
        pids = [*watch.pids, server.pid]
    alive = [pid for pid in pids if is_alive(pid)]
    check(not alive, f"all processes have ended, not {alive}")
    return {
        "machine": describe(),
        "settings": {
            "samples": len(demo.questions) * plan.batch,
            "warm_up_samples": demo.questions[0].first if demo.questions else demo.released,
            "batch": plan.batch,
            "batches_per_second": plan.per_second,
            "publish_seconds": plan.publish_seconds,
            "checkpoint_steps": plan.warm_up,
            "rows": sum(architecture.num_embeddings_per_feature),
            "ranks": RANKS,
            "drift": dataset.drift if isinstance(dataset, Synthetic) else None,
        },
        "models": demo.result(),
    }


def _config(trainer: Path, watch: Watch) -> Any:
    """Return the trainer's own settings, once it has started."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not watch.pids:
        watch.check()
        check(time.monotonic() < deadline, "the trainer starts")
        time.sleep(_POLL_SECONDS)
    return OmegaConf.load(trainer / "config.yaml")
