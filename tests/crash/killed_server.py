"""Run the recipe's server with a bomb: SIGKILL in the middle of applying its second version."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

from recipes.dlrm_criteo.serve import main
from torchrec_checknrun.serve.load import Load

PIECES = 5
"""Pieces of the second version that are written before the server dies."""
_put = Load._put
_left = [PIECES]


def _put_and_die(self: Load, *piece: Any) -> None:
    _put(self, *piece)
    _left[0] -= bool(self._plan.common)  # of a version that builds on the one that is served
    if not _left[0]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with mock.patch.object(Load, "_put", _put_and_die):
        main()
