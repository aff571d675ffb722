"""Jobs whose tables are stored as differences, and what their checkpoints must restore to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.models import CollectionSpec, Job, ModelSpec, TableSpec, uniform_plan
from torchrec_checknrun import Checkpointer, Quantization
from torchrec_checknrun.delta import log_levels
from torchrec_checknrun.delta.rows import Kind, values_of
from torchrec_checknrun.policy import Decision
from torchrec_checknrun.shards import Rectangle
from torchrec_checknrun.tools.verify import verify
from torchrec_checknrun.tracking import TrackedShard

STEP = 2.0**-9
TABLES = (TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 25, 16, ("f1", "f0")))
SPEC = ModelSpec((CollectionSpec("c", TABLES),))

Tables = dict[str, np.ndarray]

default_scheme = "fp32"
"""The scheme of optimizer state for `delta` unless told; the fixture `state_scheme` sets it."""


def make_job(seed: int = 0, spec: ModelSpec = SPEC) -> Job:
    return Job.build(spec, uniform_plan(spec, "table_wise", 1), seed=seed)


def delta(**options: Any) -> Quantization:
    chosen: dict[str, Any] = {"method": "delta", "exact_below_rows": 0, **options}
    if chosen["method"] == "delta":
        chosen.setdefault("optimizer", default_scheme)
    if not {"mean_bits", "loss"} & options.keys():
        chosen.setdefault("step", STEP)
    return Quantization(**chosen)


def lc(bits: int = 3, **options: Any) -> Quantization:
    return Quantization(method="lc", bits=bits, exact_below_rows=0, **options)


def saving(root: Path | str, job: Job, **options: Any) -> Checkpointer:
    options = {"retention": None, "chunk_bytes": 2000, "quantization": delta(), **options}
    return Checkpointer(root, model=job.model, state={"optimizer": job.optimizer}, **options)


def train(job: Job, saver: Checkpointer, steps: int = 1) -> None:
    for _ in range(steps):
        job.train()
        saver.step()


def live(saver: Checkpointer) -> Tables:
    """Copy this rank's rows of all tables, with the optimizer's state."""
    found: Tables = {}
    for shard in saver._target.tracked.shards:
        found[shard.local.name] = shard.local.weight.detach().numpy().copy()
        for name, state in shard.local.optimizer.items():
            found[f"{shard.local.name}/{name}"] = state.detach().numpy().copy()
    return found


def expected(saver: Checkpointer) -> Tables:
    """Return what a restore must give: integers times steps, or the bits of untrained rows; by
    ``lc`` the values that are kept. By ``logdelta`` state is that of its codes.

    The live rows must be within half a step, which is at most the one asked for, and state within
    a level, 9.1 %.
    """
    found = live(saver)
    for shard in saver._target.tracked.shards:
        for place, values in pieces(saver, shard):
            start = place.row_start - shard.rectangle.row_start
            found[shard.local.name][start : start + place.rows] = values
        for place, state, values in state_pieces(saver, shard):
            start = place.row_start - shard.rectangle.row_start
            found[f"{shard.local.name}/{state}"][start : start + place.rows] = values
    return found


def state_pieces(
    saver: Checkpointer, shard: TrackedShard
) -> Iterator[tuple[Rectangle, str, np.ndarray]]:
    """Yield this rank's parts of a shard's states that are stored by ``logdelta``, and what they
    must restore to.
    """
    for (table, place), references in saver._saver._links._held.items():
        if table != shard.table or shard.rectangle.intersect(place) != place:
            continue
        start = place.row_start - shard.rectangle.row_start
        for name, held in references.states.items():
            exact = shard.local.optimizer[name].detach()[start : start + place.rows]
            restored = log_levels.values_of(held.gather(np.arange(place.rows)))
            close = torch.isclose(restored, exact, rtol=0.091, atol=1e-44, equal_nan=True)
            assert (close | (exact == 0)).all()
            assert (restored[exact == 0] == 0).all()
            yield place, name, restored.numpy()


def pieces(saver: Checkpointer, shard: TrackedShard) -> Iterator[tuple[Rectangle, np.ndarray]]:
    """Yield this rank's parts of a shard, and what their rows must restore to."""
    for (table, place), references in saver._saver._links._held.items():
        if table != shard.table or shard.rectangle.intersect(place) != place:
            continue
        start = place.row_start - shard.rectangle.row_start
        weight = shard.local.weight.detach()[start : start + place.rows].numpy()
        rows = references.gather(np.arange(place.rows))
        assert (rows.kind != Kind.NONE).all()
        if references.keeps_bits:
            yield place, rows.codes.view(np.float32)
            continue
        restored = values_of(rows, torch.float32).numpy()
        exact = rows.kind == Kind.VERBATIM
        steps = np.exp2(rows.exponent.astype(float))[:, None]
        assert (abs(restored - weight.astype(float)) <= steps / 2)[~exact].all()
        restored[exact] = weight[exact]
        yield place, restored


def restored(root: Path | str, checkpoint: str | None = None, **options: Any) -> Tables:
    """Restore into a new process's model; return its rows."""
    other = make_job(seed=7, **options)
    with saving(root, other) as saver:
        assert saver.restore(checkpoint) is not None
        return live(saver)


def same(found: Tables, wanted: Tables) -> list[str]:
    """Name what differs in any bit."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


def chain(root: Path, job: Job, links: int, **options: Any) -> list[tuple[str, Tables]]:
    """Save a base and links; return their ids, each with what it must restore to."""
    made = []
    with saving(root, job, **options) as saver:
        for _ in range(1 + links):
            train(job, saver)
            made.append((saver.save().id, expected(saver)))
    return made


class Own:
    """A policy of a user's."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, history: object) -> Decision:
        self.asked += 1
        return Decision.SINCE_BASELINE if self.asked % 2 else Decision.SINCE_LAST


def manifest(root: Path, checkpoint: str) -> dict[str, Any]:
    document = json.loads((root / checkpoint / "manifest.json").read_bytes())
    found: dict[str, Any] = document["manifest"]
    return found


def sound(root: Path) -> list[str]:
    return [problem for found in verify(root) for problem in found.problems]
