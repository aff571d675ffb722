"""Draw runs of several lives whose tables are stored in few bits, and run and judge them."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.distributed.layouts import Layout, splits_into_whole_blocks
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from tests.distributed.quantized_life import live
from tests.distributed.quantized_looks import Looks
from tests.distributed.worker_pool import WorkerPool
from torchrec_checknrun import Retention
from torchrec_checknrun.root.prune import prune
from torchrec_checknrun.root.retention import pin
from torchrec_checknrun.store.folder import Folder

Workers = Callable[[int], WorkerPool]

DIMS = [4, 8, 12, 16, 20, 24, 32, 36, 44, 64, 100, 128]
FUSED = ["sgd", "rowwise_adagrad", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam"]
TRAINABLE = ("sgd", "rowwise_adagrad", "adagrad")


def draw_spec(draw: random.Random) -> ModelSpec:
    collections = []
    for number in range(draw.choice([1, 1, 2])):
        bag = number == 0 or draw.random() < 0.5
        dim = draw.choice(DIMS)
        tables = tuple(
            TableSpec(
                f"t{i}",
                draw.choice([40, 300, 999, 1000, 1001, 1500, 2111]),
                draw.choice([*DIMS, *DIMS, 256]) if bag else dim,
                tuple(draw.sample(["f0", "f1", "f2"], draw.choice([1, 1, 2]))),
            )
            for i in range(draw.choice([1, 2, 3]))
        )
        collections.append(CollectionSpec(f"c{number}", tables, bag))
    return ModelSpec(tuple(collections), fused=draw.choice(FUSED))


def draw_layout(draw: random.Random, spec: ModelSpec) -> Layout:
    ranks = draw.choice([1, 2, 2, 3])
    nodes = 2 if ranks == 2 and draw.random() < 0.5 else 1
    plan = {}
    for c in spec.collections:
        common = draw.choice(
            [n for n in (1, 2, 3, 4) if all(t.dim % (4 * n) == 0 for t in c.tables)]
        )
        for t in c.tables:
            parts = (
                common
                if not c.bag
                else draw.choice([n for n in (1, 2, 3, 4) if t.dim % (4 * n) == 0])
            )
            over = ",".join(str(draw.randrange(ranks)) for _ in range(parts))
            kinds = [f"table_wise:{draw.randrange(ranks)}"]
            if parts > 1:
                kinds += [f"column_wise:{over}"] * 2
            if splits_into_whole_blocks(t.rows, ranks):
                kinds += ["row_wise"] * 2
            if c.bag:
                if spec.fused not in ("adam", "partial_rowwise_adam"):  # no state before a step
                    kinds.append("data_parallel")
                if splits_into_whole_blocks(t.rows, ranks // nodes):
                    kinds.append(f"table_row_wise:{draw.randrange(nodes)}")
                    if t.dim >= 256 and nodes == 2:
                        kinds += ["grid_shard:0,1"] * 3
            plan[f"{c.name}.{t.name}"] = draw.choice(kinds)
    return Layout(plan, ranks, ranks // nodes)


def draw_choice(draw: random.Random, deep: bool = False) -> dict[str, Any]:
    kind = draw.choice(
        ["bits"] * 14 + ["kmeans", "importance", "fisher", "fp16", "bf16", "exact"]
        + ([] if deep else ["auto"])
    )  # fmt: skip
    choice: dict[str, Any] = {
        "optimizer": draw.choice(["fp32", "fp32", "fp32", "bf16", "log8", "rowlog8"])
    }
    if kind == "bits":
        choice |= {
            "bits": draw.choice([8, 4, 4, 3, 2]),
            "method": draw.choice(["adaptive", "adaptive", "asymmetric", "symmetric", "greedy"]),
        }
    elif kind == "kmeans":
        choice |= {"bits": draw.choice([2, 3]), "method": "kmeans"}
    elif kind == "importance":
        choice |= {"method": "importance", "mean_bits": 4}
    elif kind == "fisher":
        choice |= {"method": "fisher", "step": 0.01}
    elif kind in ("fp16", "bf16"):
        choice |= {"method": kind}
    elif kind == "auto":
        choice |= {"bits": "auto", "expected_restores": draw.choice([0.5, 1, 2, 4])}
    if draw.random() < 0.2:
        choice["compress"] = True
    return choice


def draw_quantization(draw: random.Random, linked: bool) -> dict[str, Any]:
    choice = draw_choice(draw)
    if linked:
        if draw.random() < 0.7:
            choice = {"method": "delta", **draw.choice([{"step": 2.0**-8}, {"mean_bits": 3}, {}])}
            choice["optimizer"] = draw.choice(["fp32", "logdelta", "log8"])
        else:
            choice = {"method": "lc", "bits": draw.choice([2, 3, 4])}
    choice["exact_below_rows"] = draw.choice([0, 0, 1000])
    if draw.random() < 0.35:
        choice["tables"] = {"*t1": draw_choice(draw, deep=True)}
    return choice


def draw_life(draw: random.Random, before: dict[str, Any] | None) -> dict[str, Any]:
    linked = draw.random() < 0.2
    life: dict[str, Any] = {
        "policy": draw.choice(["full", "one_shot", "intermittent", "consecutive", "consecutive"]),
        "staging": draw.choice(["copy_on_write", "copy", "encode"]),
        "background": draw.choice(["thread", "thread", "thread", "process"]),
        "chunk_bytes": draw.choice([50_000 if linked else 16_000, 100_000, 1 << 20]),
        "quantization": draw_quantization(draw, linked),
    }
    if before is not None and draw.random() < 0.6:
        life["quantization"] = before["quantization"]
    q = life["quantization"]
    methods = {q.get("method"), *(c.get("method") for c in q.get("tables", {}).values())}
    if methods & {"delta", "lc"}:
        life |= {"policy": "consecutive", "background": "thread"}
    if draw.random() < 0.15:
        life["memory_budget"] = 3 * life["chunk_bytes"]
    if draw.random() < 0.2:
        life["compact_after"] = draw.choice([1, 2])
    if draw.random() < 0.15:
        life["retention"] = draw.choice([1, 2])
    return life


def draw_script(draw: random.Random, trains: bool, restores: bool) -> list[list[Any]]:
    script: list[list[Any]] = [["restore", None]] if restores else []
    if not restores or draw.random() < 0.3:
        script.append(["write", draw.randrange(10**6), 1.0, draw.choice(["plain", "odd"])])
    for _ in range(draw.randint(1, 4)):
        for _ in range(draw.randint(0, 2)):
            if trains and draw.random() < 0.7:
                script.append(["train", draw.randint(1, 4)])
            else:
                share = draw.choice([0.001, 0.05, 0.3, 1.0])
                kind = draw.choice(["plain", "plain", "odd", "tiny"])
                script.append(["write", draw.randrange(10**6), share, kind])
        if trains and draw.random() < 0.3:
            script.append(["save_behind", draw.randint(1, 3)])
        else:
            script.append(["save"])
        if draw.random() < 0.15:
            script.append(["compact"])
        if draw.random() < 0.15:
            script.append(["restore_nth", draw.randrange(9)])
    return script


def rename(
    draw: random.Random, spec: ModelSpec, dtypes: dict[str, str]
) -> tuple[ModelSpec, dict[str, str], dict[str, str]]:
    """Give one table another name; return model, types and the map of a restore."""
    before = list(spec.table_paths)
    place = draw.randrange(len(before))
    number = iter(range(len(before)))
    collections = tuple(
        replace(
            c,
            tables=tuple(
                replace(t, name="renamed") if next(number) == place else t for t in c.tables
            ),
        )
        for c in spec.collections
    )
    found = replace(spec, collections=collections)
    names = [f"{c.name}.{t.name}" for c in collections for t in c.tables]
    after = list(found.table_paths)
    types = dict(zip(names, dtypes.values(), strict=True))
    return found, types, {before[place]: after[place]}


def run(workers: Workers, seed: int, folder: Path, lives: int = 4, say: Any = None) -> Counter[str]:
    """Run a sequence of lives; raise with all that was wrong in the first life with a problem."""
    draw = random.Random(seed)
    spec = draw_spec(draw)
    names = [f"{c.name}.{t.name}" for c in spec.collections for t in c.tables]
    trains = spec.fused in TRAINABLE and draw.random() < 0.75
    types = ["fp32", "fp32", "fp16"] if trains else ["fp32", "fp32", "fp16", "bf16"]
    dtypes = {name: draw.choice(types) for name in names}
    root, copies = folder / "root", folder / "copies"
    copies.mkdir(parents=True)
    looks = Looks(draw, root, copies, spec, dtypes)
    seen: Counter[str] = Counter()
    life = None
    renamed: dict[str, str] = {}
    for number in range(lives):
        if number > 0 and not renamed and draw.random() < 0.3:
            spec, dtypes, renamed = rename(draw, spec, dtypes)
            looks.rename(spec, dtypes)
        life = draw_life(draw, life)
        life["map"] = renamed or None
        layout = draw_layout(draw, spec)
        where = {
            "root": str(root),
            "copies": str(copies),
            "spec": spec.to_json(),
            "layout": asdict(layout),
            "dtypes": dtypes,
        }
        script = draw_script(draw, trains, number > 0)
        last = number == lives - 1
        if last or draw.random() < 0.3:
            script.append(["warm"])
        context = f"seed {seed} life {number}: {spec}\n{dtypes}\n{layout}\n{life}\n{script}"
        if say:
            say(context)
        found = workers(layout.world_size).run(
            live, where=where, life=life, script=script, seed=number, timeout=240
        )
        problems = [p for f in found for p in f["problems"]]
        for name in ("rows", "restores"):
            seen[name] += found[0]["counts"][name]
        seen["saves"] += len(found[0]["done"])
        seen["lives"] += 1
        if not problems and draw.random() < 0.25:
            pin_and_prune(draw, root)
            seen["pruned"] += 1
        if not problems:
            problems += look_elsewhere(workers, draw, where, spec, seen, renamed or None)
        if not problems:
            problems += looks.look(seen)
        assert not problems, context + "\n" + "\n".join(problems[:12])
    seen["sequences"] += 1
    return seen


def pin_and_prune(draw: random.Random, root: Path) -> None:
    """Keep one checkpoint by a pin, and the newest; delete what neither needs."""
    folder = Folder(root)
    pin(folder, draw.choice(sorted(p.parent.name for p in root.glob("*/manifest.json"))))
    prune(folder, Retention(1))


def look_elsewhere(
    workers: Workers,
    draw: random.Random,
    where: dict[str, Any],
    spec: ModelSpec,
    seen: Counter[str],
    mapped: dict[str, str] | None,
) -> list[str]:
    """Restore some of the checkpoints that are there onto another plan."""
    root = Path(where["root"])
    names = sorted(p.parent.name for p in root.glob("*/manifest.json"))
    if not names:
        return []
    some = draw.sample(names, min(len(names), 3))
    layout = draw_layout(draw, spec)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "root"
        shutil.copytree(root, other)
        found = workers(layout.world_size).run(
            live,
            where=where | {"root": str(other), "layout": asdict(layout)},
            life={"quantization": None, "map": mapped},
            script=[["restore", name] for name in some],
            seed=55,
            timeout=240,
        )
    for name in ("rows", "restores"):
        seen[name] += found[0]["counts"][name]
    return [f"elsewhere ({layout}): {p}" for f in found for p in f["problems"]]
