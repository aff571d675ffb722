"""Run the demo of online training with forks in place of what it starts, for tests of its end."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from recipes.dlrm_criteo.job import is_alive
from recipes.dlrm_criteo.online_demo import __main__ as online_demo
from tests.distributed.fork_server import ForkServer
from tests.distributed.forked_torchrun import fork_scripts


def main() -> int:
    server = ForkServer(here=True)
    with closing(server), pytest.MonkeyPatch.context() as patch:
        fork_scripts(patch, server)
        try:
            return online_demo.main()
        finally:
            # The server's end would end them.
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            left = [pid for pid in map(int, children.split()) if is_alive(pid)]
            assert not left, f"the demo has left {left}"


if __name__ == "__main__":
    sys.exit(main())
