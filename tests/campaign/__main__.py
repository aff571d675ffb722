"""Run the campaign, or parts of it, or one trial again.

python -m tests.campaign --json recipes/results/campaign.json
python -m tests.campaign --part kills-thread --trial 17
python -m tests.campaign --markdown recipes/results/campaign.json \\
    --docs docs/explanation/consistency_and_crashes.md
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", action="append", help="kills, faults, damage, hostile, or one name"
    )
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--trials", type=int, help="trials of each part, instead of all of them")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument(
        "--trial", type=int, help="run only this trial, and print all of its output"
    )
    parser.add_argument("--slice", action="store_true", help="what `make test` runs")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--json", type=Path, help="write the results here, beside those of other parts"
    )
    parser.add_argument("--markdown", type=Path, help="print the table of a file of results")
    parser.add_argument("--docs", type=Path, help="with --markdown: put the table into this page")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    # Use one thread per library; set before any of these libraries is loaded.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    from tests.campaign import results

    if given.markdown:
        rows = results.read(given.markdown)
        print(results.table(rows))
        if given.docs:
            results.put_into(given.docs, rows)
        return 0
    from tests.campaign.campaign import Campaign
    from tests.campaign.parts import PARTS

    chosen = given.part or ["kills", "faults", "damage", "hostile"]
    parts = [name for name in PARTS if any(name == c or name.startswith(f"{c}-") for c in chosen)]
    if given.part and not parts:
        parser.error(f"unknown part: {given.part}; expected one of {', '.join(PARTS)}")
    started = time.monotonic()
    campaign = Campaign(given.seed, parts, given.processes)
    try:
        if given.trial is not None:
            rows = campaign.repeat(given.trial)
        else:
            rows = campaign.run(given.json, given.first, given.trials, given.slice)
    finally:
        campaign.close()
    print(results.table(rows))
    print(*results.problems(rows), sep="\n")
    print(f"{time.monotonic() - started:.0f} s")
    whole = given.trial is given.trials is None and not (given.slice or given.first)
    print(*(results.too_few(rows) if whole else []), sep="\n")
    return any(row["failures"] for row in rows.values())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skip the leak report that a library prints at exit
