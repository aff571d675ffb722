"""In every differential checkpoint one row's optimizer state is written as zero."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.crash.sabotage import rank, replace, report, train
from torchrec_checknrun import save_planner
from torchrec_checknrun.quantization import Encoding
from torchrec_checknrun.shards import LocalShard


def sabotage() -> None:
    encode_rows = save_planner.encode_rows
    hit: set[str] = set()

    def encode_without_one(shard: LocalShard, ids: torch.Tensor, encoding: Encoding) -> Any:
        differential = len(ids) < shard.rectangle.rows
        if differential and hit <= {str(shard)}:
            hit.add(str(shard))  # always the same shard's: one row in a checkpoint
            states = {name: state.clone() for name, state in shard.optimizer.items()}
            for state in states.values():
                state[shard.local_ids(ids[:1])] = 0
            shard = dataclasses.replace(shard, optimizer=states)
            report(f"the optimizer state of row {ids[0]} of {shard} is not written")
        return encode_rows(shard, ids, encoding)

    if rank() == 0:
        replace(save_planner, "encode_rows", encode_without_one)


if __name__ == "__main__":
    sabotage()
    train()
