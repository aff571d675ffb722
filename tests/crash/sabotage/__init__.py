"""Break one thing in the trainer, which the demo must find out.

One module each, to be run in the trainer's place (`--module tests.crash.sabotage.dropped_mark`).
Each changes what the package does from outside, and says in the output when that is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from recipes.dlrm_criteo.train import main

DONE = "SABOTAGE:"
"""Begins the line that a sabotage prints once it has taken place."""


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function in another's place, for the rest of the process."""
    mock.patch.object(owner, name, function).start()


def rank() -> int:
    return int(os.environ["RANK"])


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def report(what: str) -> None:
    print(DONE, what, flush=True)


def train() -> None:
    main()
