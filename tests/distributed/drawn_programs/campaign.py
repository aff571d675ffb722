"""Draw many programs of several ranks one after the other; shrink those in which something differs.

python -m tests.distributed.drawn_programs.campaign --first 0 --count 100 --out found.txt
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from tests.distributed.drawn_programs.programs import Ranked, drawn, plainer
from tests.distributed.drawn_programs.running import Workers, run_in
from tests.distributed.worker_pool import WorkerPool
from tests.unit.drawn_programs.campaign import main
from tests.unit.drawn_programs.running import Outcome


def run(workers: Workers, ranked: Ranked) -> Outcome:
    """Run a program in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="drawn-", dir="/dev/shm") as folder:
        return run_in(workers, Path(folder) / "run", ranked)


if __name__ == "__main__":
    pools: dict[int, WorkerPool] = {}
    main(drawn, partial(run, lambda n: pools.setdefault(n, WorkerPool(n))), plainer, __doc__)
