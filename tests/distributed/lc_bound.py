"""Bound what links of LC-Checkpoint leave out, value by value: the oracle of runs that store them.

A base holds live rows to the bit. A link leaves a row alone that hasn't changed, and of the others
brings each value closer: a change in a bucket that is kept is met within half of it, and one that
is left out is far smaller than the largest of its table.
"""

from __future__ import annotations

import numpy as np

from tests.distributed import references
from tests.distributed.states import State
from tests.unit.run.deltas import pieces
from torchrec_checknrun import Checkpointer

BITS = 4
"""The x of links in tests: 15 buckets, so that the 7 largest exponents of both signs are kept."""
LEFT_OUT = 2.0**-6
"""The largest change in a bucket that is left out, over the largest change."""
APART = 0.3
"""Bounds any error: no row changes by more between two checkpoints."""


def is_table(name: str) -> bool:
    """Tell whether a value holds the rows of an embedding table."""
    return name.startswith("model/") and ".embedding" in name


def beside_tables(found: State, wanted: State) -> list[str]:
    """Describe every difference beside the rows of tables, and rows that can't be close."""
    rest = [{n: v for n, v in state.items() if not is_table(n)} for state in (found, wanted)]
    problems = references.differences(rest[0], rest[1], None)
    tables = [{n: v for n, v in state.items() if is_table(n)} for state in (found, wanted)]
    problems += [f"only in one of them: {name}" for name in tables[0].keys() ^ tables[1].keys()]
    for name in tables[0].keys() & tables[1].keys():
        rows = np.flatnonzero(~(abs(tables[0][name] - tables[1][name]) <= APART).all(axis=1))
        problems += [f"{name}: rows {list(rows)} are far off"] * bool(len(rows))
    return problems


def differences(found: State, wanted: State, parent: tuple[State, State] | None) -> list[str]:
    """Describe the rows of a checkpoint that its buckets don't explain.

    Args:
        found, wanted: what it restores to, and the live state as of then.
        parent: the same of the checkpoint that its links build on; None: it is a base.
    """
    if parent is None:
        return references.differences(found, wanted, None)
    problems = beside_tables(found, wanted)
    for name in filter(is_table, wanted.keys() & found.keys()):
        before, live_before = (state[name].astype(np.float64) for state in parent)
        restored, live = found[name].astype(np.float64), wanted[name].astype(np.float64)
        change = abs(live - before)
        unchanged = (live == live_before).all(axis=1, keepdims=True)
        bound = np.maximum(change / 2, LEFT_OUT * change.max()) + 2.0**-22 * abs(live)
        bound = np.where(unchanged, change, bound)
        rows = np.flatnonzero((abs(restored - live) > bound).any(axis=1))
        if len(rows):
            problems.append(f"{name}: rows {list(rows)} differ by more than their buckets")
    return problems


def compared(found: State, wanted: State, links: str, exact: bool) -> list[str]:
    """Describe every difference beyond what a method's links may round.

    Args:
        links: the method; empty: rows are whole.
        exact: by LC, whether ``wanted`` has the rows as links restore them, not live ones.
    """
    if links == "lc" and not exact:
        return beside_tables(found, wanted)
    return references.differences(found, wanted, None, links == "delta")


def restored_rows(saver: Checkpointer) -> State:
    """Return the rows that the last checkpoint restores to, on one rank, by its references."""
    found: State = {}
    for shard in saver._target.tracked.shards:
        for _, values in pieces(saver, shard):
            found[f"model/{shard.table}.weight"] = values
    return found
