"""Pretend to be other processes that ask for a root."""

from typing import Any

import pytest
from msgspec.structs import replace

from torchrec_checknrun.writers.claims import Claim, Holder

ELSEWHERE = {"machine": "another", "host": "far", "pid": 7, "started": 7, "run": "another run"}


def nothing(_: Claim | None) -> list[str]:
    return []


def become(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Holder:
    """Make this process another one; return the other."""
    other = replace(Holder.this_process(), **changes)
    monkeypatch.setattr(Holder, "this_process", classmethod(lambda cls: other))
    return other
