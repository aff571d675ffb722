"""Predict what links restore, in plain Python: rows by their method's rules, states by levels.

A checkpoint's files only say which rows it holds, and which share a chunk of ``lc``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from tests.distributed import lc_plain
from tests.distributed.states import State
from tests.unit.delta.plain import PlainRow, expected
from torchrec_checknrun import Quantization
from torchrec_checknrun.delta.log_levels import codes_of, values_of
from torchrec_checknrun.delta.rows import EXACT
from torchrec_checknrun.format.manifest import Manifest

RESET = 2
"""A row whose step should be so many powers of two larger than before stands alone."""
Grids = dict[str, list[PlainRow]]


@dataclass
class Known:
    """The state that a checkpoint must restore to.

    Attributes:
        state: rows and their optimizer state, by the names of a whole job's state.
        live: what they were when it was begun.
        grids: by ``delta``, rows as whole numbers.
    """

    state: State
    live: State
    grids: Grids = field(default_factory=dict)


def follow(
    root: Path, manifest: Manifest, live: State, before: Known | None, method: Quantization
) -> Known:
    """Return what a checkpoint must restore to.

    Args:
        live: the whole job's state as of its begin.
        before: what its parent restores to; None for a base.

    Raises:
        AssertionError: a row was modified, and the checkpoint doesn't hold it.
    """
    names = [lc_plain.weight_of(table) for table in manifest.deltas]
    assert names
    states = {name: _state_of(name, live) for name in names}
    wanted = {name: live[name].copy() for name in [*names, *states.values()]}
    found = Known(wanted, {name: live[name] for name in wanted})
    held = {name: np.arange(len(live[name])) for name in names}
    if before is not None:
        held = {name: np.empty(0, np.int64) for name in names}
        for table, ids, _ in lc_plain.places(root, manifest):
            name = lc_plain.weight_of(table)
            held[name] = np.concatenate([held[name], ids])
        if method.method == "lc":
            weights = {name: before.state[name] for name in names}
            found.state |= lc_plain.follow(root, manifest, live, weights)[0]
    for name, ids in held.items():
        state = states[name]
        if before is not None:
            for each in (name, state):
                _require_unchanged(live[each], before, each, ids)
                rest = np.setdiff1d(np.arange(len(live[each])), ids)
                found.state[each][rest] = before.state[each][rest]
        if method.method == "delta":
            assert method.step is not None
            known = None if before is None else before.grids[name]
            rows = _on_grids(live[name], live[state], ids, known, method.step)
            found.grids[name] = rows
            for at in ids:
                found.state[name][at] = _values(rows[at])
        if method.optimizer == "logdelta":
            found.state[state][ids] = values_of(codes_of(torch.from_numpy(live[state][ids])))
    return found


def _state_of(weight: str, live: State) -> str:
    """Name the row-wise state of a table."""
    path = weight.removeprefix("model/")
    (found,) = (name for name in live if name.startswith(f"optimizer/state/{path}/"))
    return found


def _require_unchanged(live: np.ndarray, before: Known, name: str, ids: np.ndarray) -> None:
    """Require rows that a link leaves out to be as they were, or as a restore left them."""
    bits = live.view(np.int32).reshape(len(live), -1)
    same = np.zeros(len(live), bool)
    for other in (before.live[name], before.state[name]):
        same |= (bits == other.view(np.int32).reshape(len(live), -1)).all(axis=1)
    same[ids] = True
    assert same.all(), f"rows {np.flatnonzero(~same)} of {name} are lost"


def _on_grids(
    live: np.ndarray, sums: np.ndarray, ids: np.ndarray, before: list[PlainRow] | None, step: float
) -> list[PlainRow]:
    rows = [PlainRow() for _ in live] if before is None else [replace(row) for row in before]
    for at in ids:
        total = float(sums[at])
        wanted = EXACT
        if 0 < total < math.inf:
            wanted = round(math.log2(step) - math.log2(total) / 2)
        known = rows[at]
        if known.exponent is not None and wanted >= known.exponent + RESET:
            known = PlainRow()
        rows[at] = expected(known, live[at].tolist(), wanted, 2.0**128)
    return rows


def _values(row: PlainRow) -> np.ndarray:
    if row.bits is not None:
        return np.array(row.bits, np.int32).view(np.float32)
    return np.array([float(number) for number in row.numbers], np.float32)
