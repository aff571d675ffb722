"""Measure what reading a chain of many small tables takes from a store that answers late.

    python -m recipes.benchmarks.far_store [--json out.json] [--tables 200] [--delay 0.025]
        [--links 5]

The store is memory behind a delay: each request takes as long as an object store's answer does
before the first byte. Tables of 1,000 rows and 16 columns under row-wise Adagrad; a full checkpoint
and differential ones of the 128 rows of each table that two steps look up. Counted are requests of
any kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from recipes.benchmarks.machine import describe
from recipes.dlrm_criteo import sharding
from torchrec_checknrun import Checkpointer, Consecutive, Follower, compact, load_tables
from torchrec_checknrun.root.chain import newest_required
from torchrec_checknrun.store.folder import Folder
from torchrec_checknrun.tools.export import export_dcp
from torchrec_checknrun.tools.verify import verify

ROWS, DIM, BATCH = 1000, 16, 64
_CPU = torch.device("cpu")
_ROOT = "far:///run"


class FarStore(MemoryFileSystem):
    """Files in memory, each request for which takes a while."""

    protocol = "far"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    delay = 0.0
    requests = 0
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("far://")))

    @classmethod
    def _request(cls) -> None:
        with cls._lock:
            cls.requests += 1
        time.sleep(cls.delay)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self._request()
        return super().cat_file(*args, **options)

    def info(self, *args: Any, **options: Any) -> Any:
        self._request()
        return super().info(*args, **options)

    def ls(self, *args: Any, **options: Any) -> Any:
        self._request()
        return super().ls(*args, **options)


class Model(torch.nn.Module):
    """Pooled embeddings of many small tables, and a linear layer."""

    def __init__(self, tables: int, device: torch.device = _CPU) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{i}"]
            )
            for i in range(tables)
        ]
        self.tables = EmbeddingBagCollection(configs, device=device)
        self.over = torch.nn.Linear(DIM * tables, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        answer: torch.Tensor = self.over(self.tables(features).values())
        return answer


def train(model: DistributedModelParallel, tables: int) -> None:
    """Do two steps."""
    for _ in range(2):
        ids = torch.randint(0, ROWS, (tables * BATCH,))
        lengths = torch.ones(len(ids), dtype=torch.int32)
        keys = [f"f{i}" for i in range(tables)]
        model(KeyedJaggedTensor(keys, ids, lengths=lengths)).sum().backward()


def measure(tables: int, delay: float, links: int) -> dict[str, dict[str, float]]:
    """Return seconds and requests of each way to read the chain."""
    torch.manual_seed(0)
    model = Model(tables, torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.1})
    model.over.to_empty(device=_CPU)
    plan = sharding.table_wise(model, _CPU)
    trained = DistributedModelParallel(model, device=_CPU, plan=plan, sharders=[sharding.Sharder()])
    options: dict[str, Any] = {"policy": Consecutive(), "retention": None}
    follower = Follower(_ROOT, Model(tables))
    folder = Folder(_ROOT)
    with Checkpointer(_ROOT, model=trained, **options) as checkpointer:
        for _ in range(1 + links):
            train(trained, tables)
            checkpointer.save()
        names = list(newest_required(folder).head.tables)
        found: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as exported:
            acts: Mapping[str, Callable[[], object]] = {
                "`restore()`": checkpointer.restore,
                "`load_tables()`, one table": lambda: load_tables(_ROOT, trained, names[:1]),
                "`Follower.poll()`, the first": follower.poll,
                "`checknrun verify`": lambda: verify(_ROOT),
                "`checknrun export`": lambda: export_dcp(folder, newest_required(folder), exported),
                "`checknrun compact`": lambda: compact(_ROOT),
            }
            for name, act in tqdm(acts.items(), file=sys.stderr):
                found[name] = _timed(act, delay)
        train(trained, tables)
        checkpointer.save()
        found["`Follower.poll()`, the next"] = _timed(follower.poll, delay)
    return found


def _timed(act: Callable[[], object], delay: float) -> dict[str, float]:
    FarStore.requests, FarStore.delay = 0, delay
    began = time.perf_counter()
    act()
    FarStore.delay = 0.0
    return {"seconds": time.perf_counter() - began, "requests": FarStore.requests}


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| | requests | s |", "|---|---:|---:|"]
    for name, one in results.items():
        lines.append(f"| {name} | {one['requests']:,.0f} | {one['seconds']:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.025, help="seconds of a request")
    parser.add_argument("--links", type=int, default=5, help="differential checkpoints")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    fsspec.register_implementation("far", FarStore, clobber=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results = measure(given.tables, given.delay, given.links)
    print(table(results))
    if given.json:
        asked = {name: getattr(given, name) for name in ("tables", "delay", "links")}
        about = {"machine": describe(), **asked, "results": results}
        given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
