"""Show online training: publish while training, follow in a server, score samples still unseen.

    python -m recipes.dlrm_criteo.online_demo [--data train.txt] [--json FILE]

The DLRM recipe is trained on two ranks and publishes every few seconds; a server process follows.
Samples arrive in a stream whose truth drifts, are predicted by three models, and trained on only
after that; `run.py` says how this is ensured. The last table compares the models; the last line is
`DEMO OK`, or the command fails. Ctrl-C and SIGTERM end all processes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.dlrm_criteo.demo import Unmet, check
from recipes.dlrm_criteo.job import JobFailed, cleared
from recipes.dlrm_criteo.online_demo.outcome import FIRST, FOLLOWED, markdown, table
from recipes.dlrm_criteo.online_demo.run import WRITTEN, Plan, demonstrate
from recipes.dlrm_criteo.online_demo.served import ServerFailed

LARGE_BYTES = 256 << 20
"""Files from this size on have enough rows for the plan of the synthetic stream."""
SYNTHETIC = Plan(
    batch=1024, per_second=6, seconds=120, warm_up=180, publish_seconds=3, overrides=()
)
SMALL_TSV = Plan(
    batch=16,
    per_second=4,
    seconds=120,
    warm_up=24,
    publish_seconds=2,
    overrides=("model.scale=0.0005",),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _options(arguments)
    if options.markdown is not None:
        print(markdown(json.loads(options.markdown.read_text())["models"]))
        return 0
    root = cleared(options.runs.resolve(), WRITTEN)
    try:
        with _ended_by_signals():
            found = demonstrate(root, _plan(options))
            if found["settings"]["drift"]:
                scores = [found["models"][name]["logloss"] for name in (FOLLOWED, FIRST)]
                check(scores[0] <= scores[1], f"following helps where the truth drifts: {scores}")
    except (Unmet, JobFailed, ServerFailed) as error:
        print(f"DEMO FAILED: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=140).print(table(found["models"]))
    print(f"DEMO OK: {found['settings']['samples']} samples, each predicted before it was trained")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.dlrm_criteo.online_demo", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, help="a Criteo TSV file; synthetic data without it")
    parser.add_argument("--drift", type=float, default=1.0, help="of the synthetic truth; 0: none")
    parser.add_argument("--seconds", type=float, help="of the stream that is predicted")
    parser.add_argument("--runs", type=Path, default=Path("runs/online"), help="where to write")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="only print the table of such a file")
    options = parser.parse_args(arguments)
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data}: no such file")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds {options.seconds}: expected a positive number")
    if not options.drift >= 0:
        parser.error(f"--drift {options.drift}: expected 0 (none) or more")
    return options


def _plan(options: argparse.Namespace) -> Plan:
    """Choose the sizes by the data."""
    plan = SYNTHETIC
    if options.data is not None:
        if options.data.stat().st_size < LARGE_BYTES:
            plan = SMALL_TSV
        own = ("dataset=criteo_tsv", f"dataset.path={options.data.resolve()}")
        plan = replace(plan, overrides=(*plan.overrides, *own))
    if options.seconds is not None:
        plan = replace(plan, seconds=options.seconds)
    return plan if options.data is not None else on_synthetic(plan, options.drift)


def on_synthetic(plan: Plan, drift: float) -> Plan:
    """Let a plan run on a synthetic stream of its own length."""
    samples = 2 * plan.batch * (plan.warm_up + plan.batches)  # the warm-up may be longer
    own = ("dataset=synthetic", f"dataset.samples={samples}", f"dataset.drift={2 * drift:g}")
    return replace(plan, overrides=(*plan.overrides, *own))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End by an exception when told to, so that no process is left; only the first time."""
    caught = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []

    def leave(number: int, frame: Any) -> None:
        received.append(number)
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, leave) for each in caught}
    try:
        yield
    except BaseException:
        if received:  # a library may have turned the exit into an error of its own
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    sys.exit(main())
