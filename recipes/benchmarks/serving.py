"""Measure what answers of the recipe's server notice of publications that are applied.

python -m recipes.benchmarks.serving [--json FILE] [--docs PAGE] [--scale F] [--windows N]
    [--shares SHARE ...]

The recipe's model is trained on 26 % of each table's rows between two publications of 8 bits, which
are held back. Then a server follows, and requests arrive at random times, at a quarter of the rate
that the server can answer, whether or not earlier ones were answered (open loop): a latency is
counted from the instant at which a request was due. In a third of the windows publications are
revealed, each as soon as the one before is served; in the others none is, and in half of these a
process of the follower's priority counts, which tells what any work beside the server costs on this
machine. Training has ended before the first request. All of that is repeated, with a new server,
for each share of a core that the follower may use while requests follow one another.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.benchmarks.open_loop import Load, post
from recipes.benchmarks.serving_table import markdown, put_into
from recipes.dlrm_criteo.online_demo.served import Server
from recipes.dlrm_criteo.train import CONFIGS, build
from torchrec_checknrun import Checkpointer, Publish
from torchrec_checknrun.serve.looking import NICE

FRACTION = 0.26
"""Rows that change between two versions: Check-N-Run's figure for half an hour of training."""
LOAD = 0.25
"""The portion of the server's capacity; an open loop near capacity would measure its own queue."""
SAMPLES = 16
"""In a request."""
BAGS = 64
"""Samples of the training step that changes rows."""
CLIENTS = 4
"""Clients of which each asks one question after the other, to find the server's capacity."""
LOOK_SECONDS = 0.02
"""Between two questions for the version, in windows of both kinds."""
PATIENCE_SECONDS = 120.0
_CPU = torch.device("cpu")


class Publications:
    """A training run that publishes what it changes, 26 % of each table's rows at a time."""

    def __init__(self, folder: Path, scale: float) -> None:
        with initialize_config_dir(str(CONFIGS), version_base=None):
            config = compose("train", [f"model.scale={scale}", "sharding=table_wise"])
        architecture = instantiate(config.model)
        self.rows: list[int] = architecture.num_embeddings_per_feature
        self.root = folder / "publications"
        self._model, self._optimizer = build(config, architecture, _CPU)
        self._checkpointer = Checkpointer(
            folder / "checkpoints",
            model=self._model,
            publish=Publish(self.root, every_seconds=1e9, bits=8, keep=1_000_000),
        )
        self._random = np.random.default_rng(0)

    def make(self) -> dict[str, float]:
        """Train, publish, and return what it cost."""
        self._optimizer.zero_grad()
        loss, _ = self._model(self._batch())
        loss.backward()
        self._optimizer.step()
        self._checkpointer.step()
        began = time.perf_counter()
        report = self._checkpointer.publish()
        assert report is not None
        return {
            "seconds": time.perf_counter() - began,
            "stall_seconds": report.stall_seconds,
            "bytes": sum(report.bytes.values()),
        }

    def close(self) -> None:
        """End the run; its publications stay."""
        self._checkpointer.close()

    def _batch(self) -> Batch:
        """Make samples that look up 26 % of each table's rows, each once."""
        random = self._random
        ids = [random.permutation(rows)[: max(1, int(FRACTION * rows))] for rows in self.rows]
        lengths = [
            np.bincount(random.integers(0, BAGS, len(rows)), minlength=BAGS).astype(np.int32)
            for rows in ids
        ]
        features = KeyedJaggedTensor(
            DEFAULT_CAT_NAMES,
            torch.from_numpy(np.concatenate(ids)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )
        return Batch(torch.rand(BAGS, INT_FEATURE_COUNT), features, torch.ones(BAGS))


class Revealed:
    """Publications that a server is shown, one after the other."""

    def __init__(self, hidden: Path, root: Path, server: Server) -> None:
        self._hidden, self._root, self._server = hidden, root, server
        self._base, *self._names = sorted(path.name for path in hidden.glob("seq-*"))
        self.versions: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        """From each reveal until the version was seen to be served."""

    def begin(self) -> None:
        """Reveal the first one, with all else that the root holds, and wait for it."""
        for path in self._hidden.iterdir():
            if path.name == self._base or not path.name.startswith("seq-"):
                path.rename(self._root / path.name)
        self.wait(self._base)

    def show(self, count: float) -> None:
        """Reveal some, each once the one before is served."""
        for _ in range(int(count)):
            name = self._names[len(self.versions)]
            began = time.perf_counter()
            (self._hidden / name).rename(self._root / name)
            self.versions.append(self.wait(name))
            self.seconds.append(time.perf_counter() - began)

    def wait(self, name: str) -> dict[str, Any]:
        """Ask what is served until it is this publication."""
        until = time.perf_counter() + PATIENCE_SECONDS
        while (version := self._server.version()) is None or version["id"] != name:
            if time.perf_counter() > until:
                raise TimeoutError(f"the server never serves {name}, but {version}: server.log")
            time.sleep(LOOK_SECONDS)
        return version

    def look(self, seconds: float) -> None:
        """Ask what is served as often as ``wait``, and reveal nothing."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._server.version()
            time.sleep(LOOK_SECONDS)


@contextmanager
def counting() -> Iterator[None]:
    """Let a process of the follower's priority count while a block runs."""
    count = f"import os; os.nice({NICE})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", count])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(
    folder: Path, scale: float, windows: int, shown: int, shares: list[float]
) -> dict[str, Any]:
    """Make the publications, serve them with each share of a core, and measure.

    Args:
        windows: of each kind.
        shown: publications in a window.
        shares: of a core, that the follower may use.
    """
    run = Publications(folder, scale)
    costs = [run.make() for _ in tqdm(range(1 + windows * shown), desc="publications", unit="one")]
    run.close()
    hidden = run.root.with_name("hidden")
    run.root.rename(hidden)
    random = np.random.default_rng(2)
    questions = [
        {
            "dense": random.random((SAMPLES, INT_FEATURE_COUNT)).astype(np.float32).tolist(),
            "ids": random.integers(0, run.rows, (SAMPLES, CAT_FEATURE_COUNT)).tolist(),
        }
        for _ in range(64)
    ]
    bodies = [json.dumps(question).encode() for question in questions]
    found = []
    for share in shares:
        run.root.mkdir()
        overrides = [f"model.scale={scale}", f"root={run.root}", "interval_seconds=0.05"]
        with Server(folder / "server", [*overrides, f"share={share}"]) as server:
            revealed = Revealed(hidden, run.root, server)
            requests = [post(server.host, server.port, "/predict", body) for body in bodies]
            load = Load(server.host, server.port, requests)
            cases = compare(load, revealed, windows, shown)
        found.append({"share": share, "publication": _costs(costs, revealed), **cases})
        for path in run.root.iterdir():
            path.rename(hidden / path.name)
        run.root.rmdir()
    return {"rows": sum(run.rows), "samples": SAMPLES, "windows": windows, "shares": found}


def compare(load: Load, revealed: Revealed, windows: int, shown: int) -> dict[str, Any]:
    """Ask one server while it applies publications, and while it doesn't."""
    revealed.begin()
    gc.collect()
    gc.freeze()  # else collections of this process, 0.2 s each, are counted as the server's pauses
    load.find_capacity(1.0, CLIENTS)  # warms up
    capacity = load.find_capacity(3.0, CLIENTS)
    load.per_second = LOAD * capacity
    found: dict[str, list[list[float]]] = {"applying": [], "resting": [], "counting": []}
    kinds = list(found)
    for number in tqdm(range(windows), desc="windows", unit="each kind"):
        # Each kind comes first in turn: the machine is not the same all along.
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            if kind == "applying":
                latencies = load.ask_during(revealed.show, shown)
            else:
                with counting() if kind == "counting" else nullcontext():
                    latencies = load.ask_during(revealed.look, sum(revealed.seconds[-shown:]))
            found[kind].append(latencies)
    cases = {kind: _latencies(latencies) for kind, latencies in found.items()}
    return {"capacity": capacity, "per_second": load.per_second, **cases}


def _costs(costs: list[dict[str, float]], revealed: Revealed) -> dict[str, Any]:
    """Tell what publications cost to make, and to apply: of all but the first, which is a base."""
    whole = [version["whole"] for version in revealed.versions]
    kinds = {}
    for kind, wanted in (("differential", False), ("base", True)):
        chosen = [number for number, each in enumerate(whole) if each is wanted]
        if chosen:
            kinds[kind] = {
                "count": len(chosen),
                "rows": statistics.median(revealed.versions[n]["rows_applied"] for n in chosen),
                "visible_seconds": statistics.median(revealed.seconds[n] for n in chosen),
                **{
                    name: statistics.median(costs[n + 1][name] for n in chosen) for name in costs[0]
                },
            }
    return kinds


def _latencies(windows: list[list[float]]) -> dict[str, Any]:
    seconds = np.concatenate([np.array(window) for window in windows])
    p50, p99 = np.percentile(seconds, (50, 99))
    return {
        "requests": len(seconds),
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "slowest_ms": 1e3 * seconds.max(),
        "p99_ms_of_windows": [1e3 * float(np.percentile(window, 99)) for window in windows],
    }


def main() -> None:
    """Parse the command line, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scale", type=float, default=0.1, help="of Criteo Kaggle's tables")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--shown", type=int, default=6, help="publications in a window")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.1], help="of a core, of the follower"
    )
    parser.add_argument("--markdown", type=Path, help="only print the tables of such a file")
    parser.add_argument("--docs", type=Path, help="put the tables into this page, too")
    options = parser.parse_args()
    if options.markdown is None:
        found = run(options)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        found = json.loads(options.markdown.read_text())
    print(markdown(found))
    if options.docs is not None:
        put_into(options.docs, found)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a folder that is removed."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure(folder, options.scale, options.windows, options.shown, options.shares)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)
    return {"machine": describe(), **found}


if __name__ == "__main__":
    main()
