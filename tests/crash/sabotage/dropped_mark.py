"""Never mark one row again after the baseline, whatever training does to it."""

from __future__ import annotations

import torch

from tests.crash.sabotage import rank, replace, report, train
from torchrec_checknrun.marks.marks import Marks
from torchrec_checknrun.run.facts import Begun
from torchrec_checknrun.run.saver import Saver


def sabotage() -> None:
    begin, mark = Saver.begin, Marks.mark
    baseline: list[Begun] = []
    victim: list[tuple[Marks, int]] = []

    def begin_and_see(saver: Saver, step: int, tell: bool = False) -> Begun:
        baseline.append(begin(saver, step, tell))
        return baseline[-1]

    def mark_others(marks: Marks, ids: torch.Tensor, keep: bool = True) -> None:
        if baseline and not victim and ids.numel():
            victim.append((marks, int(ids[0])))
            report(f"row {ids[0]} of a shard is not marked")
        if victim and victim[0][0] is marks:
            ids = ids[ids != victim[0][1]]
        mark(marks, ids, keep)

    if rank() == 0:
        replace(Saver, "begin", begin_and_see)
        replace(Marks, "mark", mark_others)


if __name__ == "__main__":
    sabotage()
    train()
