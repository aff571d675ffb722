"""Hold samples back from training until the gate is opened for them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from recipes.dlrm_criteo.gate import Gate, GatedDataset, GateState
from recipes.dlrm_criteo.samples import Samples
from recipes.dlrm_criteo.synthetic import Synthetic


class Watched(Synthetic):
    """A dataset that remembers up to which sample it was read."""

    def __init__(self, samples: int = 400) -> None:
        super().__init__([30] * 26, samples=samples, holdout_every=0)
        self.read_until = 0

    def generate(self, raw: np.ndarray) -> Samples:
        self.read_until = max(self.read_until, int(raw.max()) + 1)
        return super().generate(raw)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def test_no_sample_is_read_before_the_gate_is_open_for_its_whole_batch(gate: Gate) -> None:
    dataset = Watched()
    batches = GatedDataset(dataset, gate, 60).read(0, 20, 1, 2)
    taken: list[Samples] = []
    trainer = threading.Thread(target=lambda: taken.extend(batches))
    trainer.start()
    for opened in (0, 10, 19, 20, 59, 60, 79):
        gate.open_to(opened)
        trainer.join(0.05)
        assert dataset.read_until <= opened // 20 * 20
    gate.open_to(79, closed=True)
    trainer.join(20)
    assert not trainer.is_alive()
    assert len(taken) == 3  # the rest of a batch is not trained
    assert dataset.read_until == 60
    alone = list(zip(taken, Watched().read(0, 20, 1, 2), strict=False))
    assert all(a.sparse.tobytes() == b.sparse.tobytes() for a, b in alone)


def test_goes_on_at_a_position(gate: Gate) -> None:
    gate.open_to(60, closed=True)
    dataset = Watched()
    assert len(list(GatedDataset(dataset, gate, 60).read(40, 20, 0, 1))) == 1
    assert not list(GatedDataset(dataset, gate, 60).read(60, 20, 0, 1))


def test_ends_with_the_dataset(gate: Gate) -> None:
    gate.open_to(10_000)
    assert len(list(GatedDataset(Watched(100), gate, 60).read(0, 20, 0, 1))) == 5


def test_evaluation_has_no_gate(gate: Gate) -> None:
    dataset = Synthetic([30] * 26, samples=100, holdout_every=10)
    held_out = list(GatedDataset(dataset, gate, 60).read_eval(10, 10, 0, 1))
    assert sum(len(samples.labels) for samples in held_out) == 10


def test_whoever_opens_it_is_gone(gate: Gate) -> None:
    gate.open_to(40)
    batches = GatedDataset(Watched(), gate, 0.05).read(0, 20, 0, 1)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(TimeoutError, match=r"has stood at 40 samples for 0\.05 seconds"):
        next(batches)


def test_only_opens_further(gate: Gate) -> None:
    assert gate.state() == GateState(0, closed=False)
    gate.open_to(40)
    with pytest.raises(ValueError, match="is open at 40 samples and cannot be set to 20"):
        gate.open_to(20)
    gate.open_to(40, closed=True)
    with pytest.raises(ValueError, match="is closed at 40 samples"):
        gate.open_to(60)
    assert gate.state() == GateState(40, closed=True)
