"""Kill runs with images, and print what came of it.

python -m tests.crash.images --moments 100 --backward 50 --uncommitted 20 --unheard 10 --every-point
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.crash.images.sweep import Plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("moments", "backward", "uncommitted", "unheard", "recovery"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--every-point", action="store_true", help="before and after each method")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--sabotage", help="the name of a function in sabotage.py")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument(
        "--sweeps", type=json.loads, help="a JSON list of lists of these arguments: a list comes"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    from tests.crash.images import sweep

    sweeps = [parser.parse_args(words) for words in given.sweeps or []]
    sweep.warm()
    outcomes = sweep.run([_plan(each) for each in sweeps or [given]], given.seed)
    found = [{"counts": each.counts, "failures": each.failures} for each in outcomes]
    text = json.dumps(found if sweeps else found[0], indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    return any(outcome.failures for outcome in outcomes)


def _plan(given: argparse.Namespace) -> Plan:
    from tests.crash.images import kills, sabotage
    from tests.crash.images.sweep import Plan

    chosen = {
        kills.MOMENT: given.moments,
        kills.BACKWARD: given.backward,
        kills.UNCOMMITTED: given.uncommitted,
        kills.UNHEARD: given.unheard,
        kills.RECOVERY: given.recovery,
    }
    breaks = getattr(sabotage, given.sabotage) if given.sabotage else None
    return Plan(chosen, breaks, given.every_point)


if __name__ == "__main__":
    raise SystemExit(main())
