"""Show a run to its users: JSON lines, TensorBoard scalars, a progress bar.

`train.jsonl` is appended to over restarts. Each line is one write to the file, so that another
process can follow the file, and a killed worker leaves no torn line. `samples-rank*.jsonl` lists
the samples that the dataset really handed out, and so shows an error in the reader's position.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

from recipes.dlrm_criteo.evaluate import Score
from recipes.dlrm_criteo.samples import Dataset, Samples


class Report(Protocol):
    """The attributes of a checkpointer's report of a save or a restore."""

    def to_json(self) -> dict[str, Any]: ...


class JsonLines:
    """A file of events, one per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, event: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


_CHECKPOINT_SCALARS = (
    "modified_fraction",
    "modified_bytes",
    "encoded_bytes",
    "stall_seconds",
    "encoded_seconds",
    "written_seconds",
    "committed_seconds",
    "chain_length",
    "error_mean",
)


class RunLog:
    """The events of a run; only rank 0 logs, calls on the other ranks do nothing."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.enabled = rank == 0
        self._run_dir = run_dir
        self._resources = ExitStack()
        if self.enabled:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(run_dir / "train.jsonl")
            self._resources.callback(self._lines.close)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def start(
        self,
        pids: list[int],
        attempt: int,
        restored: Report | None,
        step: int,
        steps: int | None,
        samples: int,
    ) -> None:
        if not self.enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # only rank 0 waits for it

        # Drop events that an earlier attempt logged after the restored step.
        self._scalars = SummaryWriter(
            str(self._run_dir / "tensorboard"), purge_step=step if restored else None
        )
        # disable=None: no bar without a terminal
        self._bar = tqdm(initial=step, total=steps, unit="step", disable=None, mininterval=0.5)
        self._resources.callback(self._scalars.close)
        self._resources.callback(self._bar.close)
        self._first_samples, self._start = samples, time.monotonic()
        self._write(
            "start",
            pids=pids,
            attempt=attempt,
            restored=restored.to_json() if restored else None,
            step=step,
            samples=samples,
        )

    def step(self, step: int, samples: int, loss: float) -> None:
        if not self.enabled:
            return
        rate = self._rate(samples)
        self._write("step", step=step, samples=samples, loss=loss)
        self._scalars.add_scalar("train/loss", loss, step)
        self._scalars.add_scalar("train/samples_per_second", rate, step)
        self._bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} samples/s", refresh=False)
        self._bar.update(step - self._bar.n)

    def checkpoint(self, report: Report) -> None:
        """Log a report; a callback for the checkpointer."""
        if not self.enabled:
            return
        values = report.to_json()
        self._write("checkpoint", **values)
        scalars = {name: values.get(name) for name in _CHECKPOINT_SCALARS}
        if values.get("bytes"):
            scalars["bytes"] = sum(values["bytes"].values())
        for name, value in scalars.items():
            if value is not None:
                self._scalars.add_scalar(f"checkpoint/{name}", value, values["step"])

    def evaluated(self, step: int, samples: int, score: Score, final: bool) -> None:
        if not self.enabled:
            return
        self._write("eval", step=step, samples=samples, final=final, **score._asdict())
        self._scalars.add_scalar("eval/logloss", score.logloss, step)
        if score.auc is not None:
            self._scalars.add_scalar("eval/auc", score.auc, step)

    def end(self, step: int, samples: int) -> None:
        if self.enabled:
            seconds = time.monotonic() - self._start
            self._write("end", step=step, samples=samples, seconds=round(seconds, 3))

    def _rate(self, samples: int) -> float:
        return (samples - self._first_samples) / (time.monotonic() - self._start)

    def _write(self, event: str, **values: Any) -> None:
        self._lines.write({"event": event, **values})


class LoggedDataset:
    """A dataset that logs which of the samples it handed out were trained."""

    def __init__(self, dataset: Dataset, run_dir: Path, rank: int, attempt: int) -> None:
        self._dataset = dataset
        self._attempt = attempt
        self._read: deque[tuple[int, int]] = deque()  # (first, count) of every batch in flight
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(run_dir / f"samples-rank{rank}.jsonl")

    def read(
        self, position: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Samples]:
        self._read.clear()
        first = position + rank * (global_batch // world_size)
        for samples in self._dataset.read(position, global_batch, rank, world_size):
            self._read.append((first, len(samples.labels)))
            first += global_batch
            yield samples

    def read_eval(self, limit: int, batch: int, rank: int, world_size: int) -> Iterator[Samples]:
        return self._dataset.read_eval(limit, batch, rank, world_size)

    def trained(self, step: int) -> None:
        """Log the oldest batch in flight as trained by this step."""
        first, count = self._read.popleft()
        self._lines.write({"attempt": self._attempt, "step": step, "first": first, "count": count})
