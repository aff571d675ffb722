"""Fail the second differential save on one rank and go on: harmless, no row is lost."""

from __future__ import annotations

import errno
from typing import Any

from tests.crash.sabotage import attempt, rank, replace, report, train
from torchrec_checknrun import Checkpointer, CheckpointReport
from torchrec_checknrun.errors import SaveFailed
from torchrec_checknrun.save.commit import CheckpointWriter

FAILING = 3  # the baseline is the first


def sabotage() -> None:
    step, write = Checkpointer.step, CheckpointWriter.write
    saves: list[CheckpointWriter] = []

    def write_or_fail(writer: CheckpointWriter, *args: Any) -> Any:
        saves.append(writer)
        if rank() == 1 and attempt() == 0 and len(saves) == FAILING:
            raise OSError(errno.ENOSPC, "no space left, says the test")
        return write(writer, *args)

    def step_and_go_on(checkpointer: Checkpointer) -> CheckpointReport | None:
        try:
            return step(checkpointer)
        except SaveFailed as error:
            report(f"going on after: {error}")
            return None

    replace(CheckpointWriter, "write", write_or_fail)
    replace(Checkpointer, "step", step_and_go_on)


if __name__ == "__main__":
    sabotage()
    train()
