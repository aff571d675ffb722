"""In every differential checkpoint one row's optimizer state is written as zero."""

from __future__ import annotations

from typing import Any

from tests.crash.sabotage import rank, replace, report, train
from torchrec_checknrun import save_planner
from torchrec_checknrun.codecs import Codec
from torchrec_checknrun.shards import LocalShard, Rows


def sabotage() -> None:
    encode_rows = save_planner.encode_rows
    hit: set[str] = set()

    def encode_without_one(shard: LocalShard, rows: Rows, codec: Codec) -> Any:
        differential = len(rows.ids) < shard.rectangle.rows
        if differential and hit <= {str(shard)}:
            hit.add(str(shard))  # always the same shard's: one row in a checkpoint
            for state in rows.optimizer.values():
                state[0] = 0
            report(f"the optimizer state of row {rows.ids[0]} of {shard} is not written")
        return encode_rows(shard, rows, codec)

    if rank() == 0:
        replace(save_planner, "encode_rows", encode_without_one)


if __name__ == "__main__":
    sabotage()
    train()
