"""Draw many programs one after the other; shrink those in which something differs.

python -m tests.unit.drawn_programs.campaign --first 0 --count 500 --out found.txt
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.unit.drawn_programs.programs import Program, drawn, plainer
from tests.unit.drawn_programs.running import Outcome, run_in

T = TypeVar("T")


def run(program: Program) -> Outcome:
    """Run a program; an error that is none of this package's is a loss, too."""
    with tempfile.TemporaryDirectory(prefix="drawn-", dir="/dev/shm") as folder:
        try:
            return run_in(Path(folder) / "run", program)
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            return Outcome(lost=[f"{type(error).__name__}: {error}", *lines[-30:]])


def kind(outcome: Outcome) -> str:
    """Name what an outcome is by its first words."""
    if outcome.invalid is not None:
        return f"invalid {outcome.invalid[:90]}"
    if outcome.refused is not None:
        return f"refused {outcome.refused[:160]}"
    if outcome.lost:
        return f"lost {outcome.lost[0].split(':')[0]}"
    return "same"


def shrunk(
    program: T, run: Callable[[T], Outcome], plainer: Callable[[T], list[T]], least: int = 60
) -> T:
    """Return a plainer program in which something differs as well."""
    wanted = kind(run(program))[:7]
    tries = 0
    smaller = True
    while smaller and tries < least:
        smaller = False
        for other in plainer(program):
            tries += 1
            if kind(run(other))[:7] == wanted:
                program, smaller = other, True
                break
    return program


def main(
    drawn: Callable[[int], T],
    run: Callable[[T], Outcome],
    plainer: Callable[[T], list[T]],
    description: str | None,
) -> None:
    """Draw, run and shrink programs as the command line says.

    Args:
        drawn: makes the program of a seed.
        run: runs one.
        plainer: makes plainer ones of one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    met: Counter[str] = Counter()
    started = time.monotonic()
    with given.out.open("a") as out:
        for seed in range(given.first, given.first + given.count):
            if time.monotonic() - started > given.seconds:
                break
            program = drawn(seed)
            outcome = run(program)
            name = kind(outcome)
            met[name] += 1
            if name != "same":
                small = program
                if name.startswith("lost") and not given.no_shrink:
                    small = shrunk(program, run, plainer)
                    outcome = run(small)
                told = outcome.lost or [outcome.refused or outcome.invalid or ""]
                told = [*told[:30], *(f"warned: {line}" for line in sorted(set(outcome.warnings)))]
                print(f"{seed} {name}\n  {program}\n  {small}", *told, sep="\n    ", file=out)
                out.flush()
            met.update(f"fact: {fact}" for fact in set(outcome.facts))
            met.update(f"failed: {line[:110]}" for line in outcome.failed)
        print(f"{time.monotonic() - started:.0f} s", file=out)
        for name, count in met.most_common():
            print(f"{count:5} {name}", file=out)


if __name__ == "__main__":
    main(drawn, run, plainer, __doc__)
