"""Each checkpoint is the state of one instant, bit for bit, while training goes on unhindered.

Every chunk of rows is copied late and slowly, so that training overwrites most rows before the
background comes to them; so are the dense part and data-parallel tables. Each checkpoint is
compared with a copy of the whole state taken at its cut. A case counts only if rows were really
copied on write.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.slowed import Instants, slowed
from tests.distributed.test_tracking_zoo import NODES, PLANS
from tests.distributed.worker_pool import WorkerPool
from tests.distributed.zoo import Zoo, build_zoo
from tests.examples import ALL, some_of

Workers = Callable[[int], WorkerPool]

SAVES = 3 if ALL else 2


def train_and_save(instants: Instants, train: Callable[[], object]) -> list[int]:
    """Save several checkpoints, each with steps before it and during it."""
    train()
    for number in range(SAVES):
        instants.save(lambda: (train(), train()), lambda: [train() for _ in range(4)])
        if number == 0:
            train()
    return instants.close()


def plain_loop(
    root: str,
    kind: str,
    plan: dict[str, str],
    fused: Any,
    policy: str,
    at_cut: list[str],
    dim: int = 8,
    nodes: int = 1,
    chunk_bytes: int = 700,
) -> list[int]:
    def build() -> Zoo:
        return build_zoo(kind, plan, fused, dim=dim, nodes=nodes)

    zoo = build()
    with slowed() as chunks:
        instants = Instants(
            root, zoo, build(), chunks, tuple(at_cut), policy=policy, chunk_bytes=chunk_bytes
        )
        return train_and_save(instants, zoo.train)


LOOPS: dict[str, dict[str, Any]] = {
    "rows": {"plan": PLANS["rows"], "fused": "sgd"},
    "one rank has no row": {"plan": PLANS["one_rank"], "fused": "adagrad"},
    "columns": {"plan": PLANS["columns"], "policy": "one_shot"},
    "mixed": {"plan": PLANS["mixed"], "policy": "one_shot"},
    "full": {"plan": PLANS["rows"], "policy": "full", "fused": "adagrad"},
    "full columns": {"plan": PLANS["columns"], "policy": "full"},
    "weighted": {"plan": PLANS["rows"], "kind": "weighted"},
    "sequence": {"plan": PLANS["columns"], "kind": "sequence", "fused": "adagrad"},
    "processed": {"plan": PLANS["rows"], "kind": "feature_processed", "policy": "one_shot"},
    "variable batches": {
        "plan": {"t0": "row_wise", "t1": "table_wise:0", "t2": "table_wise:1"},
        "kind": "vbe",
        "fused": {"t0": "rowwise_adagrad", "t1": "sgd", "t2": "rowwise_adagrad"},
    },
    "several kernels": {
        "plan": {"t0": "row_wise", "t1": "row_wise", "t2": "column_wise:0,1"},
        "fused": {"t0": "adagrad", "t1": "sgd", "t2": "rowwise_adagrad"},
        "policy": "one_shot",
    },
    "replicas": {"plan": PLANS["replicas"]},
    "one node": {"plan": NODES["one_node"][0]},
    "grid": {"plan": NODES["grid"][0], "nodes": 2, "dim": 256, "chunk_bytes": 20_000},
    "moving average": {
        "plan": PLANS["rows"],
        "fused": "ema",
        "at_cut": ["t0", "t1", "t2"],
    },
}


@pytest.mark.parametrize("case", some_of(sorted(LOOPS), 3, 4, 11, 13))
def test_plain_loop(workers: Workers, tmp_path: Path, case: str) -> None:
    arguments: dict[str, Any] = {
        "kind": "bags",
        "fused": "rowwise_adagrad",
        "policy": "consecutive",
        "at_cut": [],
    }
    arguments |= LOOPS[case]
    protected = workers(2).run(plain_loop, root=str(tmp_path), **arguments)[0]
    assert len(protected) == SAVES
    whole = [*arguments["at_cut"], *(t for t, how in arguments["plan"].items() if "data" in how)]
    assert all((count > 0) == (len(whole) < 3) for count in protected), protected
