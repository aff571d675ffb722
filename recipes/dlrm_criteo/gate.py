"""Keep samples from training until they have been predicted: online training with no look ahead.

Whoever predicts opens the gate further after each prediction; the trainer's reader takes a batch
of the stream only once the gate is open for all of it. So a model can be scored on samples that no
version of it has seen, whatever the speeds of the two, and learn from them afterwards. The gate is
a small file, and the trainer may be on any number of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recipes.dlrm_criteo.samples import Dataset, Samples

_POLL_SECONDS = 0.005


class GateState(NamedTuple):
    """A number of samples that may be trained, and whether it stays that number."""

    samples: int
    closed: bool


class Gate:
    """A file that says how many samples of a stream may be trained.

    One process opens it; any number of others wait at it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def open_to(self, samples: int, closed: bool = False) -> None:
        """Let this many samples through, counted from the stream's start.

        Args:
            closed: no more will follow: training ends after the last whole batch of them.
        """
        before = self.state()
        if samples < before.samples or before.closed:
            raise ValueError(
                f"the gate {self._path} is {'closed' if before.closed else 'open'} at "
                f"{before.samples} samples and cannot be set to {samples}: it only opens further"
            )
        # Replaced as a whole: who waits never reads half a number.
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_text(f"{samples} {'closed' if closed else 'open'}\n")
        new.replace(self._path)

    def state(self) -> GateState:
        """Read the gate; before it is first opened no sample may be trained."""
        try:
            samples, word = self._path.read_text().split()
        except FileNotFoundError:
            return GateState(0, closed=False)
        return GateState(int(samples), closed=word == "closed")

    def wait_for(self, samples: int, timeout_seconds: float) -> bool:
        """Wait until so many samples are let through; return False if they never will be.

        Raises:
            TimeoutError: the gate was not opened further for so long: whoever predicts is gone.
        """
        last, since = self.state(), time.monotonic()
        while last.samples < samples:
            if last.closed:
                return False
            time.sleep(_POLL_SECONDS)
            now = self.state()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > timeout_seconds:
                raise TimeoutError(
                    f"the gate {self._path} has stood at {last.samples} samples for "
                    f"{timeout_seconds:g} seconds, training waits for {samples}: whoever opens it "
                    "is gone or too slow (trainer.timeout_seconds)"
                )
        return True


class GatedDataset:
    """A dataset whose training samples are read only behind a gate.

    All ranks end after the same batch, since a closed gate doesn't move.
    """

    def __init__(self, dataset: Dataset, gate: Gate, timeout_seconds: float) -> None:
        self._dataset, self._gate, self._seconds = dataset, gate, timeout_seconds

    def read(
        self, position: int, global_batch: int, rank: int, world_size: int
    ) -> Iterator[Samples]:
        batches = self._dataset.read(position, global_batch, rank, world_size)
        while self._gate.wait_for(position + global_batch, self._seconds):
            samples = next(batches, None)
            if samples is None:
                return
            yield samples
            position += global_batch

    def read_eval(self, limit: int, batch: int, rank: int, world_size: int) -> Iterator[Samples]:
        return self._dataset.read_eval(limit, batch, rank, world_size)
