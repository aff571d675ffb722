"""Check that only ``dcp/`` uses DCP's protocols: saves and restores do without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_checknrun

PACKAGE = Path(torchrec_checknrun.__file__).parent
DCP = "torch.distributed.checkpoint"
ALLOWED = f"{DCP}.stateful"
"""The protocol of state objects, which is independent of planners and storage."""
DOORS = ("dcp", "hydra_config", "tools")
"""Rooms that may use DCP: ``hydra_config`` offers stock DCP to compare with, ``tools`` exports to
its format.
"""


def imported(source: str) -> Iterator[str]:
    """Yield the modules that a file imports, and the names imported from modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses_dcp(source: str) -> list[str]:
    return [
        name
        for name in imported(source)
        if f"{name}.".startswith(f"{DCP}.") and not f"{name}.".startswith(f"{ALLOWED}.")
    ]


def engine() -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [path for path in files if path.relative_to(PACKAGE).parts[0] not in DOORS]


def test_the_engine_does_without_dcp() -> None:
    files = engine()
    assert {"save", "restore", "run"} <= {path.relative_to(PACKAGE).parts[0] for path in files}
    used = {str(path.relative_to(PACKAGE)): uses_dcp(path.read_text()) for path in files}
    assert {name: found for name, found in used.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"from {DCP}.planner import SavePlan", [f"{DCP}.planner.SavePlan"]),
        (f"def late():\n    import {DCP} as dcp", [DCP]),
        ("from torch.distributed import checkpoint", [DCP]),
        (f"from {DCP}.stateful import Stateful", []),
        ("import torch.distributed as dist", []),
    ],
)
def test_an_import_is_seen(source: str, found: list[str]) -> None:
    assert uses_dcp(source) == found
