"""After the baseline one row is never marked again, whatever training does to it."""

from __future__ import annotations

from typing import Any

import torch

from tests.crash.sabotage import rank, replace, report, train
from torchrec_checknrun import Checkpointer
from torchrec_checknrun.tracking import Marks


def sabotage() -> None:
    save, mark = Checkpointer.save, Marks.mark
    baseline: list[Any] = []
    victim: list[tuple[Marks, int]] = []

    def save_and_see(checkpointer: Checkpointer) -> Any:
        baseline.append(save(checkpointer))
        return baseline[-1]

    def mark_others(marks: Marks, ids: torch.Tensor) -> None:
        if baseline and not victim and ids.numel():
            victim.append((marks, int(ids[0])))
            report(f"row {ids[0]} of a shard is not marked")
        if victim and victim[0][0] is marks:
            ids = ids[ids != victim[0][1]]
        mark(marks, ids)

    if rank() == 0:
        replace(Checkpointer, "save", save_and_see)
        replace(Marks, "mark", mark_others)


if __name__ == "__main__":
    sabotage()
    train()
