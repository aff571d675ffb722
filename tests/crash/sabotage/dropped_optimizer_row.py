"""Write one row's optimizer state as zero in every differential checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.crash.sabotage import rank, replace, report, train
from torchrec_checknrun.codecs.quantization import TableEncoding
from torchrec_checknrun.shards import RowBlock
from torchrec_checknrun.snapshot import staged


def sabotage() -> None:
    encode_rows = staged.encode_rows
    hit: set[str] = set()

    def encode_without_one(block: RowBlock, encoding: TableEncoding) -> Any:
        differential = len(block.ids) < block.shape.rows
        if differential and hit <= {block.table}:
            hit.add(block.table)  # always the same table's: one row in a checkpoint
            states = {name: state.clone() for name, state in block.optimizer.items()}
            for state in states.values():
                state[0] = 0
            block = dataclasses.replace(block, optimizer=states)
            report(f"the optimizer state of row {block.ids[0]} of {block.table} is not written")
        return encode_rows(block, encoding)

    if rank() == 0:
        replace(staged, "encode_rows", encode_without_one)


if __name__ == "__main__":
    sabotage()
    train()
