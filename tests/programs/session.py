"""Start a training program for a test, kill it at a step, and compare it at its end.

The programs beside this module are written as their teams would. Of the tests they know only
``after_step``, which they call at the end of each turn of their loops, and they return their
objects at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.programs.live import live
from torchrec_checknrun import CheckpointReport

AfterStep = Callable[[int], None]
"""A function that is called with the number of steps done."""
KILLED_AT = 11
"""In the middle of an interval; two checkpoints are durable by then, the third may be."""
STEPS, INTERVAL = 16, 3


@dataclass
class Ended:
    """The objects of a program at its end.

    Attributes:
        objects: everything made for training, by name.
        reports: one for every checkpoint of this process.
        resumed_from: the restored step, 0 for a fresh start.
    """

    objects: dict[str, object]
    reports: list[CheckpointReport] = field(default_factory=list)
    resumed_from: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "live": live(self.objects),
            "reports": [report.to_json() for report in self.reports],
            "resumed_from": self.resumed_from,
        }


Program = Callable[..., Ended]
"""A function that is called with a root and ``AfterStep``."""


def killer(step: int | None, victim: int = 1) -> AfterStep:
    """Return a function that kills a rank with SIGKILL at the end of a step; None kills none."""

    def after_step(done: int) -> None:
        if done == step and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    return after_step


def run(main: Program) -> None:
    """Run a program as a script under torchrun: ``ROOT RESULTS``; the first attempt is killed."""
    root, results = sys.argv[1:3]
    torch.set_num_threads(1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ended = main(root, killer(KILLED_AT if first else None)).to_json()
    result = Path(results, f"{os.environ['RANK']}.json")
    result.write_text(json.dumps({**ended, "first": first}))
    dist.barrier()
    dist.destroy_process_group()


def run_here(root: str, program: str, kill_at: int | None = None, **options: Any) -> dict[str, Any]:
    """Run a program's ``main`` in this process, which has a process group; see ``Ended``."""
    main: Program = importlib.import_module(f"tests.programs.{program}").main
    return main(root, killer(kill_at), **options).to_json()
