"""Reduce a run's figures to those that the tables of the docs read, for the repository.

    python -m recipes.benchmarks.side_by_side.shrink out.json recipes/results/side_by_side.json

All saves and reports of a run are half a megabyte; their medians are in the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SINGLE = {
    "training": ("saves", "reports", "limits", "limit_bytes"),
    "bytes": ("checkpoints",),
}
"""Fields of a part's rows from which the others were computed."""


def shrunk(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run without single measurements."""
    return {
        part: [_without(row, _SINGLE[part]) for row in rows] if part in _SINGLE else rows
        for part, rows in found.items()
    }


def _without(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def main() -> None:
    """Run the command."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m recipes.benchmarks.side_by_side.shrink OUT.json RESULT.json")
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(shrunk(json.loads(source.read_text())), indent=1) + "\n")


if __name__ == "__main__":
    main()
