"""Cuts whose saves fail while their layers of marks are not packed: the next one holds their rows.

Rows are copied on write throughout; every checkpoint that commits is compared with the state at its
cut, restored through its whole chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.background_jobs import storage_fails
from tests.distributed.slowed import Instants, overflow_pages, slowed
from tests.distributed.test_tracking_zoo import PLANS
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import build_zoo
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.marks.marks import Marks

Workers = Callable[[int], WorkerPool]


def fail_once(instants: Instants, train: Callable[[int], object], early: bool) -> SaveFailed:
    """Fail a save, before any of its rows is copied or at its end; return the error."""
    saver, chunks = instants.saver, instants.chunks
    chunks.go.clear()
    saver.steps += 1
    with storage_fails("before"):
        saver.save(wait=False)
        train(2)
        save = saver._saver.running
        assert save is not None
        if early:
            save.give_up(SaveFailed("given up, says the test"))
        chunks.go.set()
        train(1)
        with pytest.raises(SaveFailed, match="says the test") as failed:
            saver.wait()
    assert save.thread is not None
    save.thread.join(30)
    return failed.value


def failing(root: str, policy: str, fails: list[bool], early: bool, packed: bool) -> list[int]:
    """Save in a row; some saves fail, and their errors are kept, as users keep them in lists."""
    zoo, again = build_zoo("bags", PLANS["columns"]), build_zoo("bags", PLANS["columns"])
    unpacked = mock.patch.object(Marks, "consolidate", return_value=None)
    errors = []
    with nullcontext() if packed else unpacked, slowed() as chunks:
        instants = Instants(root, zoo, again, chunks, policy=policy)
        zoo.train(2)
        for fail in (*fails, False, *fails, False, False):
            if fail:
                errors.append(fail_once(instants, zoo.train, early))
                free, total = overflow_pages(instants.saver)
                assert free == total, "the memory of a failed save is kept by its error"
            else:
                instants.save(lambda: zoo.train(2), lambda: zoo.train(1))
            if not packed:
                for shard in instants.saver._target.tracked.shards:
                    assert shard.marks.layers
                    assert len(shard.marks.layers[-1]._packed) < 3
        assert len(errors) == 2 * sum(fails)
        return instants.close()


CASES = list(itertools.product([[True, False], [False, True], [True, True]], [False, True]))
QUICK = {3: "consecutive"}


@pytest.mark.parametrize(
    ("number", "policy"),
    [
        pytest.param(number, policy, marks=() if policy == QUICK.get(number) else pytest.mark.slow)
        for number in range(len(CASES))
        for policy in ("consecutive", "one_shot", "full")
    ],
)
def test_rows_of_failed_saves_are_kept(
    workers: Workers, tmp_path: Path, number: int, policy: str
) -> None:
    fails, early = CASES[number]
    arguments: dict[str, Any] = {"fails": fails, "early": early, "packed": number in (1, 2, 5)}
    protected = workers(2).run(failing, root=str(tmp_path), policy=policy, **arguments)[0]
    assert min(protected) > 0
