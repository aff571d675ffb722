"""The oracle of runs with LC-Checkpoint accepts what links restore, and finds a row they lose."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.distributed import lc_bound
from tests.distributed.states import State
from tests.unit.run.deltas import Tables, lc, live, make_job, restored, saving, train

pytestmark = pytest.mark.usefixtures("group")


def named(tables: Tables) -> State:
    """Name tables as a whole job's state does."""
    return {
        f"optimizer/{n}" if "/" in n else f"model/c.embedding_bags.{n}.weight": v
        for n, v in tables.items()
    }


def test_a_lost_row_is_found_in_any_link(tmp_path: Path) -> None:
    job, states, lost = make_job(), [], 0
    with saving(tmp_path, job, quantization=lc(lc_bound.BITS)) as saver:
        for _ in range(5):
            train(job, saver)
            id = saver.save().id
            states.append((named(restored(tmp_path, id)), named(live(saver))))
    assert lc_bound.differences(*states[0], None) == []
    for parent, (found, wanted) in pairwise(states):
        assert lc_bound.differences(found, wanted, parent) == []
        for name in filter(lc_bound.is_table, found):
            changed = (wanted[name] != parent[1][name]).any(axis=1)
            for row in np.flatnonzero(changed):
                wrong = {**found, name: found[name].copy()}
                wrong[name][row] = parent[0][name][row]
                lost += 1
                assert lc_bound.differences(wrong, wanted, parent), (name, row)
    assert lost > 20
