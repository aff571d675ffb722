"""Print the tables of the documentation from a JSON of `python -m recipes.figures.accuracy`.

python -m recipes.figures.accuracy.markdown [recipes/results/accuracy.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.figures.accuracy.tasks import TASKS

RESULT = Path(__file__).resolve().parents[2] / "results" / "accuracy.json"


def tables(numbers: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each task's name and the lines of its table."""
    for name, task in numbers["tasks"].items():
        effects = {(e["method"], e["restores"], e["after"]): e for e in task["effects"]}
        sizes = {s["method"]: s for s in task["sizes"] if s["kind"] == "differential"}
        restores = sorted({restores for _, restores, _ in effects})
        heads = [f"R = {number}" for number in restores]
        titles = ["rows", "weights, B", "id", "state", *heads, f"rare ids, R = {restores[-1]}"]
        lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
        for method in dict.fromkeys(method for method, _, _ in effects):
            size = sizes.get(method)
            cells = [f"{size[x]:.2f}" for x in ("weights", "ids", "state")] if size else 3 * [""]
            cells += [_percent(effects[method, number, 0]["loss"]) for number in restores]
            cells.append(_percent(effects[method, restores[-1], 0]["rare"]))
            lines.append(f"| {method} | {' | '.join(cells)} |")
        yield name, lines


def _percent(interval: list[float]) -> str:
    mean, low, _ = interval
    return f"{100 * mean:+.3f} ± {100 * (mean - low):.3f}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.figures.accuracy.markdown", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, nargs="?", default=RESULT)
    for name, lines in tables(json.loads(parser.parse_args().json.read_text())):
        print(f"{TASKS[name].title}:\n")
        print("\n".join(lines), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
