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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("moments", "backward", "uncommitted", "unheard", "recovery"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--every-point", action="store_true", help="before and after each method")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--sabotage", help="the name of a function in sabotage.py")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    from tests.crash.images import kills, sweep

    plan = {
        kills.MOMENT: given.moments,
        kills.BACKWARD: given.backward,
        kills.UNCOMMITTED: given.uncommitted,
        kills.UNHEARD: given.unheard,
        kills.RECOVERY: given.recovery,
    }
    sabotage = None
    if given.sabotage:
        from tests.crash.images import sabotage as sabotages

        sabotage = getattr(sabotages, given.sabotage)
    sweep.warm()
    outcome = sweep.run(plan, given.seed, sabotage, given.every_point)
    found = {"counts": outcome.counts, "failures": outcome.failures}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return bool(outcome.failures)


if __name__ == "__main__":
    raise SystemExit(main())
