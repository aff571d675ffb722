"""Restore shards of remapping tables on other ranks, and refuse malformed index entries."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from tests.examples import some_of
from tests.unit.entries import collisions_of, fields
from torchrec_checknrun.errors import CorruptCheckpoint
from torchrec_checknrun.format.entries import Facts
from torchrec_checknrun.model.blocks import Span
from torchrec_checknrun.model.collisions import RAW_IDS, CollisionState
from torchrec_checknrun.restore.collisions import CollisionRestore, make_up


def equal(ranks: int, rows: int = 24) -> tuple[Span, ...]:
    size = -(-rows // ranks)
    return tuple((i * size, min((i + 1) * size, rows)) for i in range(ranks))


def owner(raw: int, ranks: int, ids: int) -> int:
    """Return the rank to which TorchRec sends a raw id."""
    return raw // -(-ids // ranks) if ids else raw % ranks


@pytest.mark.parametrize(
    ("saved", "now", "ids"),
    some_of(
        product([1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 6, 8], [0, 10, 240, 241, 242, 2**63 - 1]),
        *range(0, 216, 5),  # all of each argument's values
    ),
)
def test_against_every_raw_id(saved: int, now: int, ids: int) -> None:
    """Compare with every raw id: a row must be on the rank that gets the ids of that row."""
    if saved == now:
        return  # never asked for
    raws = set(range(480))
    if ids:
        bounds = [i * -(-ids // ranks) for ranks in (saved, now) for i in range(ranks + 1)]
        near = (bound + d for bound in bounds for d in range(-2, 2))
        raws = {raw for raw in (*near, *raws) if 0 <= raw < ids}
    fits = True
    for raw in raws:
        start, stop = equal(saved)[owner(raw, saved, ids)]
        first, last = equal(now)[owner(raw, now, ids)]
        fits &= first <= start and stop <= last
    made = [make_up(own, equal(now), equal(saved), ids) for own in equal(now)]
    assert all(made) == fits


def test_rows_that_are_dealt_out_unevenly() -> None:
    saved = ((0, 10), (10, 20), (20, 24))
    assert make_up((0, 24), ((0, 24),), saved, 240)
    assert not make_up((10, 24), ((0, 10), (10, 24)), saved, 240)  # half of the ids, not a third
    assert not make_up((0, 12), ((0, 12), (12, 24)), saved, 240)


def entry(**change: Any) -> dict[str, Any]:
    state = CollisionState({"m.t": Facts((0, 4), 100, None, 3, 7, 6, 50)}, {"m.t": {}})
    found = json.loads(json.dumps(fields(state.encode(0))))
    return {**found, "modules": {"m.t": {**found["modules"]["m.t"], **change}}}


def test_facts_come_back() -> None:
    facts = Facts((0, 4), 100, None, 3, 7, 6, 50)
    assert collisions_of(entry()).modules == {"m.t": facts}
    assert CollisionRestore(None).plan({"c": collisions_of(entry())}, [], (), "seq-1") == []


@pytest.mark.parametrize(
    "broken",
    [
        {"rows": [0]},
        {"rows": [0, "4"]},
        {"rows": None},
        {"buckets": "x"},
        {"iteration": None},
        {"history_size": 1.5},
        {"other": 1},
    ],
    ids=str,
)
def test_a_malformed_entry(broken: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="of a collisions chunk is malformed"):
        collisions_of(entry(**broken))
    whole = entry()
    for field in ("rank", "modules"):
        left = {k: v for k, v in whole.items() if k != field}
        with pytest.raises(CorruptCheckpoint, match="malformed"):
            collisions_of(left)


def test_history_as_bytes() -> None:
    state = CollisionState({"m.t": Facts((0, 4), 100, None)}, {"m.t": {"ids": torch.arange(3)}})
    chunk = state.encode(5)
    assert fields(chunk)["rank"] == 5
    assert chunk.getvalue() == torch.arange(3).numpy().tobytes()


def test_raw_ids_of_hash_tables_have_torchrecs_name() -> None:
    assert HashZchManagedCollisionModule.IDENTITY_BUFFER in RAW_IDS
