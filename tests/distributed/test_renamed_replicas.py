"""Rename a data-parallel table, whose optimizer is saved, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.layouts import build
from tests.distributed.test_other_tables import (
    SPEC,
    T1,
    TABLES,
    Workers,
    checkpointer,
    layout,
)
from tests.distributed.unsharded import whole_state


def replicas_renamed(root: str, sharding: str) -> None:
    """Rename a data-parallel table whose optimizer is saved, alone in its parameter group, too."""
    first = replace(SPEC, fused="adagrad")
    for number, tables in enumerate((TABLES, TABLES[1:])):
        old = replace(first, collections=(replace(SPEC.collections[0], tables=tables),))
        where = layout(old, "data_parallel")
        job = build(old.to_json(), where)
        job.optimizer.param_groups[0]["lr"] = 0.03
        job.train(3)
        path = f"{root}/{number}"
        with checkpointer(path, job, optimizer=job.optimizer, job=job) as saver:
            saver.save()
        new = (*tables[:-1], replace(TABLES[1], name="new"))
        spec = replace(first, collections=(replace(SPEC.collections[0], tables=new),))
        other_where = layout(spec, sharding)
        again = build(spec.to_json(), other_where, seed=5)
        again.train(1)
        with checkpointer(path, again, optimizer=again.optimizer, job=again) as saver:
            report = saver.restore(map={"t1": "new"})
            assert report is not None
            assert report.skipped == ()
            found, wanted = whole_state(again, other_where), whole_state(job, where)
            for part in ("weights", "states"):
                assert np.array_equal(
                    getattr(found, part)["a.embedding_bags.new"], getattr(wanted, part)[T1]
                )
            assert again.optimizer.param_groups[0]["lr"] == 0.03
            if sharding == "data_parallel":
                state = again.optimizer.state_dict()["state"]
                assert state["tables.a.embedding_bags.new.weight"]["step"] == 3
            again.train(1)
            saver.save()


@pytest.mark.parametrize("sharding", ["data_parallel", "row_wise"])
def test_a_data_parallel_table_is_renamed(workers: Workers, tmp_path: Path, sharding: str) -> None:
    workers(2).run(replicas_renamed, root=str(tmp_path), sharding=sharding)
