"""Measure the accuracy lost by restoring quantized rows: a small version of the paper's figure 14.

    python -m recipes.figures.accuracy_smoke [--json out.json] [--png out.png] [--quick]

Two runs of a job differ by more than a restore does, so branches are compared in pairs. At a branch
point the job continues from one state with the same samples, restored and not restored. Restored:
`Checkpointer.save()` and `restore()`, some steps of training, and again, up to 20 times. After the
1st, 3rd, 10th and 20th restore both branches are evaluated on the same held-out samples: at once,
and after 100 more steps without restores. The result is the relative change of logloss and AUC,
averaged over several branch points, with the lowest and highest.

`noise` is the floor: a branch whose table values change by a part in 10^7 wherever others are
restored. One in 10^5 is shown, too: harmless at once, but not always some steps later, since a
gradient that is zero or not decides whether Adagrad takes a first step, which is large. Smaller
changes than that are indistinguishable from chance. `exact`, restored from fp32 rows, must not
change anything, and so proves that the pairs match.

Importance-weighted width gets the largest budget that takes no more bytes than a fixed width, over
all rows and over all rows ever trained. Tables of every size are quantized.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.dlrm_criteo.evaluate import Score
from recipes.figures import plots
from recipes.figures.small_job import SmallJob, State, small_job
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.bitwidth import row_bytes
from torchrec_checknrun.codecs import ImportanceWeighted, RowContext
from torchrec_checknrun.codecs.base import WIDTHS
from torchrec_checknrun.codecs.budget import ImportanceSurvey

METHODS = ("asymmetric", "adaptive")
BUDGETS = (3, 4, 8)
"""Fixed widths whose bytes importance-weighted rows may take; 2 bit leave no choice."""
MARGIN = 0.99
"""Part of those bytes to use: the rows of later checkpoints are unknown when the budget is chosen.
"""
NOISES = (1e-7, 1e-5)
"""Relative changes of every table value that have no meaning."""


@dataclass(frozen=True)
class Plan:
    """The lengths of all parts, in steps."""

    points: tuple[int, ...]
    """Steps after which the job branches."""
    restores: tuple[int, ...]
    gap: int
    """Steps between two restores."""
    after: int
    """Steps until a branch is evaluated again."""
    batch: int
    eval_samples: int

    @property
    def length(self) -> int:
        """Return the steps of a branch."""
        return (self.restores[-1] - 1) * self.gap + self.after

    @property
    def trained(self) -> int:
        """Return the steps of one branch with everything tried on the way."""
        return (self.restores[-1] - 1) * self.gap + len(self.restores) * self.after


FULL = Plan(
    points=(1500, 2000, 2500, 3000),
    restores=(1, 3, 10, 20),
    gap=20,
    after=100,
    batch=1024,
    eval_samples=32768,
)
QUICK = Plan(points=(200,), restores=(1, 3), gap=10, after=20, batch=512, eval_samples=8192)


@dataclass(frozen=True)
class Scheme:
    """One way to store rows. ``bits``: the width, or the one whose bytes are not exceeded."""

    method: str
    quantization: Quantization | None
    """None: no checkpoint, disturbed values instead."""
    bits: int | None = None
    noise: float = 0.0

    @property
    def name(self) -> str:
        if self.noise:
            return f"{self.method} {self.noise:g}"
        return self.method if self.bits is None else f"{self.method} {self.bits} bit"


@dataclass(frozen=True)
class Change:
    """A restored branch against the one without restores. ``logloss``, ``auc``: relative, 0 is
    none.
    """

    scheme: str
    point: int
    restores: int
    after: int
    logloss: float
    auc: float


@dataclass(frozen=True)
class Bytes:
    """Bytes of the tables' weights that a branch has stored."""

    scheme: str
    point: int
    first: int
    """The first checkpoint, which is full."""
    all: int


def schemes(job: SmallJob) -> Iterator[Scheme]:
    """Yield all schemes to compare, in the job's present state."""
    for level in NOISES:
        yield Scheme("noise", None, noise=level)
    yield Scheme("exact", Quantization())
    for method in METHODS:
        for bits in WIDTHS:
            chosen = Quantization(bits=bits, method=method, exact_below_rows=0)
            yield Scheme(method, chosen, bits)
    for bits in BUDGETS:
        budget = mean_bits_within(job, bits)
        chosen = Quantization(method="importance", mean_bits=budget, exact_below_rows=0)
        yield Scheme("importance", chosen, bits)


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


def branch(
    job: SmallJob,
    start: State,
    batches: Sequence[Batch],
    plan: Plan,
    restore: Callable[[], object],
    progress: Callable[[], object],
) -> dict[tuple[int, int], Score]:
    """Return scores by (number of restores, steps after the last one); the job's end state is
    undefined.

    Args:
        start: where the branch begins.
        batches: to train, ``plan.length`` of them.
        restore: saves and restores, or does the replacement of that.
    """
    job.put_back(start)
    scores = {}
    for number in range(1, plan.restores[-1] + 1):
        restore()
        done = (number - 1) * plan.gap
        if number in plan.restores:
            scores[number, 0] = job.evaluate()
            here = job.keep()
            job.train(batches[done : done + plan.after], progress)
            scores[number, plan.after] = job.evaluate()
            # Trained rows stay marked as modified: more rows than needed.
            job.put_back(here)
        if number < plan.restores[-1]:
            job.train(batches[done : done + plan.gap], progress)
    return scores


def restored_branch(
    job: SmallJob,
    scheme: Scheme,
    start: State,
    batches: Sequence[Batch],
    plan: Plan,
    progress: Callable[[], object],
) -> tuple[dict[tuple[int, int], Score], list[int]]:
    """Return a branch's scores, and the bytes of the tables' weights in its checkpoints."""
    if scheme.quantization is None:
        source = torch.Generator(device=job.shards[0].weight.device).manual_seed(0)
        return branch(
            job, start, batches, plan, lambda: disturb(job, scheme.noise, source), progress
        ), []
    stored: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        job.put_back(start)
        state = {"optimizer": job.optimizer, "reader": job.reader}
        with Checkpointer(
            folder, model=job.model, retention=None, state=state, quantization=scheme.quantization
        ) as checkpointer:

            def restore() -> None:
                report = checkpointer.save()
                assert report is not None, "a gradient is waiting between steps"
                stored.append(report.bytes["weights"])
                checkpointer.restore(report.id)

            return branch(job, start, batches, plan, restore, progress), stored


@torch.no_grad()
def disturb(job: SmallJob, level: float, generator: torch.Generator) -> None:
    """Change every table value by a random part of about ``level``."""
    for shard in job.shards:
        size, device = shard.weight.shape, shard.weight.device
        noise = torch.randn(size, generator=generator, device=device)
        shard.weight.mul_(noise.mul_(level).add_(1))


def measure(job: SmallJob, plan: Plan) -> tuple[list[Change], list[Bytes]]:
    """Measure all schemes at all branch points."""
    changes, stored = [], []
    branches = 2 + len(NOISES) + len(METHODS) * len(WIDTHS) + len(BUDGETS)
    total = plan.points[-1] + len(plan.points) * branches * plan.trained
    with tqdm(total=total, unit="step") as bar:
        step = 0
        for point in plan.points:
            bar.set_description(f"step {point}")
            job.train(job.batches(point - step), bar.update)
            step, start = point, job.keep()
            batches = job.batches(plan.length)
            found = list(schemes(job))
            control = branch(job, start, batches, plan, lambda: None, bar.update)
            for scheme in found:
                bar.set_description(f"step {point}, {scheme.name}")
                scores, sizes = restored_branch(job, scheme, start, batches, plan, bar.update)
                changes += [
                    Change(scheme.name, point, *key, *relative(score, control[key]))
                    for key, score in scores.items()
                ]
                if sizes:
                    stored.append(Bytes(scheme.name, point, sizes[0], sum(sizes)))
            job.put_back(start)
    return changes, stored


def relative(score: Score, control: Score) -> tuple[float, float]:
    """Return the relative changes of logloss and AUC."""
    assert score.auc is not None, "held-out labels are all the same"
    assert control.auc is not None
    return score.logloss / control.logloss - 1, score.auc / control.auc - 1


def summary(changes: list[Change], stored: list[Bytes]) -> list[dict[str, Any]]:
    """Average over the branch points, by scheme, number of restores and steps after."""
    rows = []
    for scheme, restores, after in dict.fromkeys((c.scheme, c.restores, c.after) for c in changes):
        key = (scheme, restores, after)
        own = [c for c in changes if (c.scheme, c.restores, c.after) == key]
        row: dict[str, Any] = {"scheme": scheme, "restores": restores, "after": after}
        for name in ("logloss", "auc"):
            values = np.array([getattr(change, name) for change in own])
            row[name] = float(values.mean())
            row[f"{name}_low"], row[f"{name}_high"] = float(values.min()), float(values.max())
        sizes = [one for one in stored if one.scheme == scheme]
        row["first_bytes"] = round(float(np.mean([s.first for s in sizes]))) if sizes else None
        row["all_bytes"] = round(float(np.mean([s.all for s in sizes]))) if sizes else None
        rows.append(row)
    return rows


def main() -> int:
    """Run the command; return 1 if restoring exact rows changed anything."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.accuracy_smoke", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--png", type=Path, help="draw them there")
    parser.add_argument("--quick", action="store_true", help="one branch point, few steps")
    parser.add_argument("--dim", type=int, default=16, help="columns of every table")
    options = parser.parse_args()
    if options.png:
        plots.require_matplotlib()
    plan = QUICK if options.quick else FULL
    overrides = [
        f"model.embedding_dim={options.dim}",
        f"model.bottom_mlp=[64,32,{options.dim}]",
        f"trainer.batch_size={plan.batch}",
        f"trainer.eval_samples={plan.eval_samples}",
    ]
    with small_job(overrides) as job:
        changes, stored = measure(job, plan)
    rows = summary(changes, stored)
    Console(width=150).print(_table(rows, plan))
    if options.json:
        content = {
            **describe(),
            "plan": asdict(plan),
            "dim": options.dim,
            "summary": rows,
            "changes": [asdict(change) for change in changes],
            "bytes": [asdict(one) for one in stored],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.png:
        plots.draw_accuracy(rows, options.png)
    exact = max(abs(c.logloss) + abs(c.auc) for c in changes if c.scheme == "exact")
    print(f"exact rows: logloss and AUC change by {exact:g}")
    return 0 if exact == 0 else 1


def _table(rows: list[dict[str, Any]], plan: Plan) -> Table:
    table = Table(
        title=f"change of logloss in % (AUC in %) after R restores: at once; after {plan.after} "
        f"more steps. Mean of {len(plan.points)} branch points"
    )
    table.add_column("scheme")
    table.add_column("full, MB", justify="right")
    table.add_column("all, MB", justify="right")
    for number in plan.restores:
        table.add_column(f"R = {number}", justify="right")
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = {(r["restores"], r["after"]): r for r in rows if r["scheme"] == scheme}
        first = own[plan.restores[0], 0]
        sizes = [first["first_bytes"], first["all_bytes"]]
        cells = [
            "; ".join(_percent(own[number, after]) for after in (0, plan.after))
            for number in plan.restores
        ]
        table.add_row(scheme, *("" if s is None else f"{s / 1e6:.2f}" for s in sizes), *cells)
    return table


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['logloss']:+.4f} ({100 * row['auc']:+.4f})"


if __name__ == "__main__":
    sys.exit(main())
