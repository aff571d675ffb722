"""List the variations of the quick start by name; each is a ``Training`` of its own.

All are short, and each resumed once in another state than it was killed in, or could have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.programs import loop_variations, optimizer_variations
from tests.programs.batches import Clicks
from tests.programs.quickstart import ROWS, Reader
from tests.programs.session import INTERVAL, STEPS, AfterStep, Ended
from tests.programs.training import Training
from torchrec_checknrun import Checkpointer, CheckpointReport, Consecutive

VARIATIONS: dict[str, type[Training]] = {
    name: kind
    for module in (loop_variations, optimizer_variations)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Training) and kind is not Training
}


def main(root: str, after_step: AfterStep, variation: str) -> Ended:
    torch.manual_seed(5)
    training = VARIATIONS[variation]()
    reader = Reader(Clicks(ROWS, dist.get_rank(), STEPS))
    reports: list[CheckpointReport] = []

    def make(root: str) -> Checkpointer:
        return Checkpointer(
            root,
            model=training.model,
            state={"optimizer": training.optimizer, "reader": reader, **training.state},
            policy=Consecutive(),
            every_steps=INTERVAL,
            when_busy="wait",
            callbacks=[reports.append],
            **training.options,
        )

    checkpointer = make(root)
    checkpointer.restore()
    resumed_from = checkpointer.steps
    for batch in reader:
        training.turn(reader.position, batch)
        checkpointer.step()
        after_step(checkpointer.steps)
    checkpointer.close()
    with make(f"{root}-end") as whole:  # a whole one of state that may have grown until here
        whole.steps = checkpointer.steps
        whole.save()
    return Ended({"model": training.model, "training": training}, reports, resumed_from)
