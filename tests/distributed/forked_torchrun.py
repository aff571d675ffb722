"""Be torchrun, with workers that are forks: a job of two ranks starts in 2 s, not in 15.

Started as a ``Forked`` script, with torchrun's arguments. All but the start of a worker is
torchrun's own. Its ranks have one hash seed, unlike those of a worker pool.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from recipes.dlrm_criteo import job
from recipes.dlrm_criteo.online_demo import served
from tests.distributed.fork_server import ForkServer
from tests.distributed.forked import Forked


def fork_scripts(patch: pytest.MonkeyPatch, of: ForkServer | None = None) -> None:
    """Fork what the recipe's demos start: trainers and their torchrun, servers.

    Args:
        of: the server that forks them.
    """

    def start(module: str, *words: str, log: Path) -> Forked:
        return Forked(__name__ if module == run.__name__ else module, *words, log=log, of=of)

    for each in (job, served):
        patch.setattr(each, "start_script", start)


def main() -> None:
    server = ForkServer(here=True)

    def start(_: SubprocessHandler, words: Sequence[str], environment: dict[str, str]) -> Forked:
        assert list(words[:2]) == [sys.executable, "-u"], words
        script = words[3:] if words[2] == "-m" else words[2:]
        return Forked(*script, log=Path("/dev/stdout"), of=server, environment=environment)

    with closing(server), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubprocessHandler, "_popen", start)
        run.main(sys.argv[1:])


if __name__ == "__main__":
    main()
