"""Run the README's loop on the pages' small job, on one rank, and print what it prints.

python -m tests.docs.readme_loop /tmp/run-17
"""

from __future__ import annotations

import sys

from tests.docs.blocks import blocks_of
from tests.docs.job import Job
from torchrec_checknrun.elastic import init_process_group

ROOT = "/checkpoints/run-17"


def loop() -> str:
    """Return the README's first Python block."""
    return next(block.text for block in blocks_of("README.md") if block.language == "python")


def main(root: str) -> None:
    """Train 200 steps, with a checkpoint every 100, in a folder that should be new."""
    init_process_group()
    job = Job(batches=200)
    names = {"dmp": job.dmp, "optimizer": job.optimizer, "reader": job.reader}
    text = loop().replace(ROOT, root).replace("init_process_group()  #", "#")
    exec(text, {**names, "train_step": job.unhurried_step})


if __name__ == "__main__":
    main(sys.argv[1])
