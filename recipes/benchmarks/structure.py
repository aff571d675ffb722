"""Measure the package's structure: the files, rooms and borders on the way of a row.

python -m recipes.benchmarks.structure [--json FILE]

A room is a package below the top one; modules beside these packages are the slab and the doors,
each a room of its own. Counted are files and lines of each room, imports that cross rooms, long and
complex functions, and how often a save of one row, and a restore of a chain of two, call from one
module, or from one room, into another.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_checknrun
from torchrec_checknrun import Checkpointer, Consecutive

PACKAGE = Path(torchrec_checknrun.__file__).parent
SLAB = "(slab and doors)"
LONG = 60
COMPLEX = 12


@dataclass
class Calls:
    """Calls between modules of the package, in all threads.

    Attributes:
        modules: those that were entered.
        crossings: from one module into another.
        between_rooms: from one room into another.
    """

    modules: set[str] = field(default_factory=set)
    crossings: int = 0
    between_rooms: int = 0

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call; a profile function (``sys.setprofile``)."""
        if event != "call":
            return
        callee = frame.f_globals.get("__name__", "")
        if not callee.startswith(f"{PACKAGE.name}."):
            return
        self.modules.add(callee)
        caller = _caller(frame.f_back)
        if caller and caller != callee:
            self.crossings += 1
            self.between_rooms += _room(caller) != _room(callee)


def _caller(frame: FrameType | None) -> str:
    """Return the nearest module of the package up the stack; nothing in a thread's first call."""
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(f"{PACKAGE.name}."):
            return name
        frame = frame.f_back
    return ""


@cache
def _room(module: str) -> str:
    parts = module.split(".")[1:]
    is_room = len(parts) == 1 or PACKAGE.joinpath(*parts).is_dir()
    return ".".join(parts if is_room else parts[:-1])


@contextmanager
def counted() -> Iterator[Calls]:
    """Count calls between modules within the block."""
    calls = Calls()
    threading.setprofile(calls.see)
    sys.setprofile(calls.see)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def files(package: Path = PACKAGE) -> dict[str, dict[str, int]]:
    """Return files, lines and the longest file's lines of each room."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(package.rglob("*.py")):
        room = str(path.parent.relative_to(package)) if path.parent != package else SLAB
        lines = len(path.read_text().splitlines())
        of_room = found.setdefault(room, {"files": 0, "lines": 0, "longest": 0})
        of_room["files"] += path.name != "__init__.py"
        of_room["lines"] += lines
        of_room["longest"] = max(of_room["longest"], lines)
    return found


def imports(package: Path = PACKAGE) -> dict[str, int]:
    """Count the imports inside the package, and those that cross rooms."""
    names = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
    }
    found: collections.Counter[str] = collections.Counter(imports=0, crossing=0)
    for path in package.rglob("*.py"):
        own = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            targets = {
                name if (name := f"{node.module}.{alias.name}") in names else node.module
                for alias in node.names
            }
            for target in targets & names:
                found["imports"] += 1
                found["crossing"] += _room(target) != _room(own)
    return dict(found)


def functions(package: Path = PACKAGE) -> dict[str, int]:
    """Count the functions, and those over the limits of lines and complexity."""
    found = {"functions": 0, f"over_{LONG}_lines": 0}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found["functions"] += 1
                body = (node.end_lineno or 0) - node.body[0].lineno + 1
                found[f"over_{LONG}_lines"] += body > LONG
    ruff = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"),
            *("--config", f"lint.mccabe.max-complexity={COMPLEX}", "--output-format", "json"),
            str(package),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    found[f"over_complexity_{COMPLEX}"] = len(json.loads(ruff.stdout))
    return found


def way_of_a_row() -> dict[str, Calls]:
    """Save a differential checkpoint of one modified row, and restore the chain of two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = _model()
            with Checkpointer(folder, model=model, policy=Consecutive()) as saver:
                _touch(model, 0)
                saver.save()
                _touch(model, 1)
                with counted() as save:
                    saver.save()
            with Checkpointer(folder, model=_model()) as reader, counted() as restore:
                reader.restore()
    finally:
        dist.destroy_process_group()
    return {"save": save, "restore": restore}


def _model() -> DistributedModelParallel:
    """Shard one table of 100 rows and row-wise Adagrad."""
    table = EmbeddingBagConfig(
        name="table", embedding_dim=8, num_embeddings=100, feature_names=["feature"]
    )
    tables = EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    where = construct_module_sharding_plan(
        tables, {"table": table_wise(rank=0)}, local_size=1, world_size=1, device_type="cpu"
    )
    cpu = torch.device("cpu")
    return DistributedModelParallel(tables, device=cpu, plan=ShardingPlan({"": where}))


def _touch(model: DistributedModelParallel, row: int) -> None:
    ids = torch.tensor([row])
    features = KeyedJaggedTensor(["feature"], ids, lengths=torch.tensor([1]))
    model(features).to_dict()["feature"].sum().backward()


def main(arguments: list[str] | None = None) -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "rooms": files(),
        "imports": imports(),
        "functions": functions(),
        "way_of_a_row": {
            name: {**asdict(calls), "modules": len(calls.modules)}
            for name, calls in way_of_a_row().items()
        },
    }
    found["lines"] = sum(room["lines"] for room in found["rooms"].values())
    for name, room in found["rooms"].items():
        print(
            f"{name:20} {room['files']:3} files {room['lines']:6} lines, longest {room['longest']}"
        )
    for name in ("lines", "imports", "functions", "way_of_a_row"):
        print(f"{name}: {found[name]}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
