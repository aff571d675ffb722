"""Every operation of a link's save fails: what is restored is the old rows or the new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.crash.faulty_store import Faults, Mode, patience
from tests.crash.save_sweep import alone, faulty_roots
from tests.examples import some_of
from tests.unit.run.deltas import Tables, delta, expected, lc, live, make_job, same, saving
from torchrec_checknrun import Quantization
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.tools.verify import verify

STRIDE = 24
"""Distance of the operations that `make test` takes; each mode begins with another one."""

Where = tuple[Faults, Callable[[], str]]
LIMITS = {"delta": 2.0**-3, "lc": 0.5}
"""By method, how far a restored value lies from the live one."""


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Where]:
    with alone(), faulty_roots(tmp_path if request.param == "disk" else None) as found:
        yield found


def one(where: Where, chosen: Quantization, number: int, mode: Mode | None) -> bool:
    """Fail one operation of a link's save; return whether the save was told to have failed."""
    faults, new_root = where
    root, job, told = new_root(), make_job(), False
    with saving(root, job, quantization=chosen) as saver:
        for _ in range(2):
            job.train(2)
            saver.save()
        old = expected(saver)
        job.train()
        faults.arm(number, mode)
        try:
            saver.save()
        except SaveFailed:
            told = True
        faults.disarm()
        found = restored_from(root)
        if not told:
            assert same(found, expected(saver)) == []
        elif same(found, old):  # committed all the same: within a step of what was live
            close(found, live(saver), chosen)
        assert problems(root) == []
        job.train()
        assert saver.save().kind == "differential" or told
        assert same(restored_from(root), expected(saver)) == []
        assert problems(root) == []
    return told


def restored_from(root: str) -> Tables:
    other = make_job(seed=7)
    with saving(root, other) as reader:
        assert reader.restore() is not None
        return live(reader)


def close(found: Tables, wanted: Tables, chosen: Quantization) -> None:
    relative = 0.091 if chosen.optimizer == "logdelta" else 0.0
    for name, values in wanted.items():
        limit = abs(values) * relative if "/" in name else LIMITS[chosen.method]
        assert (np.abs(found[name] - values) <= limit).all(), name


def problems(root: str) -> list[str]:
    return [problem for found in verify(root) for problem in found.problems]


def sweep(where: Where, stride: int, chosen: Quantization) -> None:
    one(where, chosen, 0, None)
    operations = list(where[0].asked_for)
    for number, mode in enumerate(Mode):
        with patience(mode):
            total = sum(operation.can_fail(mode) for operation in operations)
            places = range(1 + 5 * number % stride, total, stride)
            told = [one(where, chosen, at, mode) for at in places]
            assert any(told) or mode.transient, mode


@pytest.mark.parametrize(
    ("where", "chosen"),
    some_of(product(["memory", "disk"], [delta(optimizer="logdelta"), lc()]), 1, 2),
    indirect=["where"],
    ids=["memory-logdelta", "memory-lc", "disk-logdelta", "disk-lc"],
)
def test_links(where: Where, chosen: Quantization) -> None:
    sweep(where, STRIDE, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [delta(), lc()], ids=["delta", "lc"])
def test_links_at_every_operation(where: Where, chosen: Quantization) -> None:
    sweep(where, 1, chosen)
