"""List the ways to store rows that are compared: a line for each.

Tables of every size are stored so. Importance-weighted width gets the largest budget that takes no
more bytes than a fixed width, over all rows and over all rows ever trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from recipes.figures.small_job import SmallJob
from torchrec_checknrun import Quantization
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs import ImportanceWeighted, RowContext
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.budget import ImportanceSurvey

ROWWISE = ("symmetric", "asymmetric", "greedy", "adaptive")
BUDGETS = (3, 4, 8)
"""Fixed widths whose bytes importance-weighted rows may take; 2 bit leave no choice."""
STEPS = (2, 3, 4)
"""Bits of a value that a full checkpoint takes with rows' own steps, from which links start."""
LOSSES = (3e-4, 1e-4, 3e-5, 2e-5, 1e-5)
"""Relative changes of the loss that a restore may cost, by which links choose their steps."""
MARGIN = 0.99
"""Part of those bytes to use: the rows of later checkpoints are unknown when the budget is chosen.
"""

Choose = Callable[[SmallJob], Quantization]
"""Makes the choice of how rows are stored, in the job's present state."""


@dataclass(frozen=True)
class Method:
    """One way to store rows.

    Attributes:
        choose: None: nothing is stored, and values are disturbed instead.
        noise: relative size of that disturbance.
    """

    name: str
    choose: Choose | None
    noise: float = 0.0


def _stored(**options: Any) -> Choose:
    """Make a choice that does not depend on the job, from ``Quantization``'s arguments."""

    def choose(_: SmallJob) -> Quantization:
        return Quantization(exact_below_rows=0, **options)

    return choose


def _importance(bits: int, job: SmallJob) -> Quantization:
    budget = mean_bits_within(job, bits)
    return Quantization(method="importance", mean_bits=budget, exact_below_rows=0)


def _of_loss(loss: float, optimizer: str, job: SmallJob) -> Quantization:
    reader = job.reader
    return Quantization(
        method="delta",
        loss=loss,
        current_loss=job.loss(),
        total_steps=reader.position // reader.global_batch,
        batch_size=reader.global_batch,
        optimizer=optimizer,
        exact_below_rows=0,
    )


METHODS: tuple[Method, ...] = (
    Method("noise 1e-07", None, 1e-7),
    Method("exact", _stored()),
    *(
        Method(f"{name} {bits} bit", _stored(bits=bits, method=name))
        for name in ROWWISE
        for bits in WIDTHS
    ),
    *(Method(f"kmeans {bits} bit", _stored(bits=bits, method="kmeans")) for bits in WIDTHS),
    *(Method(f"importance {bits} bit", partial(_importance, bits)) for bits in BUDGETS),
    Method("fp16", _stored(method="fp16")),
    Method("bf16", _stored(method="bf16")),
    *(
        Method(f"adaptive {bits} bit, log8", _stored(bits=bits, optimizer="log8", compress=True))
        for bits in (2, 4)
    ),
    *(Method(f"fisher {bits} bit", _stored(method="fisher", mean_bits=bits)) for bits in STEPS),
    *(Method(f"delta {bits} bit", _stored(method="delta", mean_bits=bits)) for bits in STEPS),
    *(
        Method(
            f"delta {bits} bit, {scheme}",
            _stored(method="delta", mean_bits=bits, optimizer=scheme),
        )
        for scheme in ("log8", "logdelta")
        for bits in STEPS
    ),
    Method("lc 3 bit", _stored(method="lc", bits=3)),
    *(Method(f"delta loss {loss:.0e}", partial(_of_loss, loss, "fp32")) for loss in LOSSES),
    *(
        Method(f"delta loss {loss:.0e}, {scheme}", partial(_of_loss, loss, scheme))
        for scheme in ("log8", "logdelta")
        for loss in LOSSES
    ),
)
"""All that can be compared. ``noise``: the floor, a change without a meaning. ``exact`` must not
change anything, and so proves that the pairs match.
"""


def methods_of(patterns: Sequence[str]) -> list[Method]:
    """Return the methods whose names match a pattern, in their order.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(method.name, pattern) for method in METHODS):
            names = ", ".join(method.name for method in METHODS)
            raise ValueError(f"no method matches {pattern!r}; there are {names}")
    return [m for m in METHODS if any(fnmatchcase(m.name, pattern) for pattern in patterns)]


def mean_bits_within(job: SmallJob, bits: int) -> float:
    """Return the budget at which importance-weighted rows take no more bytes than ``bits``."""
    tables = [(s.weight.detach(), s.optimizer["momentum1"].detach()) for s in job.shards]
    trained = [(w[state > 0], state[state > 0]) for w, state in tables]

    def fits(mean_bits: float) -> bool:
        for blocks in (tables, trained):
            survey = ImportanceSurvey()
            for weight, state in blocks:
                survey.add(weight, state)
            codec = ImportanceWeighted(mean_bits=mean_bits)
            codec = codec.settle(survey)
            taken = [
                codec.encode(w, context=RowContext({"momentum1": state})).data.numel()
                for w, state in blocks
            ]
            allowed = [len(w) * row_bytes(w.shape[1], bits) for w, _ in blocks]
            if sum(taken) > MARGIN * sum(allowed):
                return False
        return True

    low, high = 2.0, float(bits)
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
