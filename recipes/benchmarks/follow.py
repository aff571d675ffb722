"""Measure how fast a follower applies modified rows, and what predictions notice of that.

python -m recipes.benchmarks.follow [--json FILE] [--rows N] [--dim N] [--rounds N] [--rest S]

A table is trained on 26 % of its rows between two checkpoints of 4 bits, and followed by a model
quantized to 4 bits, on one thread. Beside it: FBGEMM's list API, given the same rows in its layout,
and a full reload, by ``torch.load`` and by ``dcp.load``, each with ``quantize_inference_model``.
Then four threads predict with a model of two kernels (SUM and MEAN, two dims) and a linear layer
for as long as a version is applied again and again, and for as long as nothing is: the answers a
second, and the slowest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recipes.benchmarks.machine import describe
from torchrec_checknrun import Checkpointer, Consecutive, Follower, Quantization

FRACTION = 0.26
"""Rows that change between two versions: Check-N-Run's figure for half an hour of training."""
READERS = 4
CPU = torch.device("cpu")


class Served(nn.Module):
    """One table with a linear layer; or two, summed and averaged, the second a quarter as wide."""

    def __init__(
        self, rows: int, dim: int, device: torch.device = CPU, *, two: bool = False
    ) -> None:
        super().__init__()
        pooled = [("t", dim, PoolingType.SUM), ("mean", dim // 4, PoolingType.MEAN)]
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=width,
                    feature_names=["f"],
                    pooling=pooling,
                )
                for name, width, pooling in pooled[: 1 + two]
            ],
            device=device,
        )
        self.over = nn.Linear(dim + dim // 4 * two, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        answer: torch.Tensor = self.over(self.ebc(features).values())
        return answer


def quantized(model: nn.Module) -> Any:
    """Quantize a model to 4 bits as TorchRec does."""
    return quantize_inference_model(model, quantization_dtype=torch.quint4x2)


class Run:
    """A training run that saves what it changes, 26 % of the rows at a time."""

    def __init__(self, root: Path, rows: int, dim: int, *, two: bool = False) -> None:
        self.rows = rows
        model = Served(rows, dim, torch.device("meta"), two=two)
        apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.01})
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            model.ebc,
            dict.fromkeys(("t", "mean")[: 1 + two], table_wise(rank=0)),
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            model, device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
        )
        self.saver = Checkpointer(
            root,
            model=self.model,
            policy=Consecutive(),
            quantization=Quantization(bits=4, method="asymmetric"),
            retention=None,
        )

    def publish(self) -> None:
        """Train on 26 % of the rows, and save."""
        ids = torch.randperm(self.rows)[: int(FRACTION * self.rows)]
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids)).long())
        self.model(features).mean().backward()
        self.saver.step()
        self.saver.save()
        self.saver.wait()


def apply_speed(run: Run, follower: Follower, dim: int, rounds: int) -> dict[str, float]:
    """Measure polls that apply a differential checkpoint: from the look to the swap, and with the
    copy to the other side.
    """
    visible, whole, rows, read = [], [], 0, 0
    for _ in range(rounds):
        run.publish()
        began = time.perf_counter()
        version = follower.poll()
        whole.append(time.perf_counter() - began)
        assert version is not None
        assert version.error is None
        assert not version.whole
        visible.append(version.seconds)
        rows, read = version.rows_applied, version.bytes_read
    size = rows * dim * 4
    return {
        "rows": rows,
        "bytes_read": read,
        "visible_seconds": statistics.median(visible),
        "seconds": statistics.median(whole),
        "visible_gigabytes": size / statistics.median(visible) / 1e9,
        "gigabytes": size / statistics.median(whole) / 1e9,
    }


def list_api(rows: int, dim: int, rounds: int) -> dict[str, float]:
    """Measure FBGEMM's list API, with rows at hand in its layout."""
    kernel = quantized(Served(rows, dim)).ebc._emb_modules[0]
    ids = torch.randperm(rows)[: int(FRACTION * rows)].sort().values
    values = kernel.split_embedding_weights(False)[0][0][ids].clone()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        kernel.embedding_inplace_update([0], [ids.tolist()], [values])
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return {"seconds": median, "gigabytes": len(ids) * dim * 4 / median / 1e9}


def full_reload(folder: Path, rows: int, dim: int, rounds: int) -> dict[str, float]:
    """Measure ``torch.load`` of all rows, and their quantization."""
    path = folder / "whole.pt"
    torch.save(Served(rows, dim).state_dict(), path)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        model = Served(rows, dim, torch.device("meta"))
        model.load_state_dict(torch.load(path, weights_only=True), assign=True)
        quantized(model)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    changed = int(FRACTION * rows) * dim * 4
    return {"seconds": median, "gigabytes": changed / median / 1e9}


def dcp_reload(folder: Path, rows: int, dim: int, rounds: int) -> dict[str, float]:
    """Measure ``dcp.load`` of all rows, and their quantization."""
    path = folder / "dcp"
    dcp.save(Served(rows, dim).state_dict(), checkpoint_id=path, no_dist=True)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        model = Served(rows, dim, torch.device("meta")).to_empty(device="cpu")
        dcp.load(model.state_dict(), checkpoint_id=path, no_dist=True)
        quantized(model)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    changed = int(FRACTION * rows) * dim * 4
    return {"seconds": median, "gigabytes": changed / median / 1e9}


def predictions(follower: Follower, rows: int, act: Callable[[], object]) -> dict[str, float]:
    """Predict in four threads while something is done; return answers a second, and the slowest."""
    ends = threading.Event()
    counts, slowest = [0] * READERS, [0.0] * READERS
    ids = torch.randint(0, rows, (64 * 20,))
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.full((64,), 20))

    def predict(number: int) -> None:
        with torch.no_grad():
            while not ends.is_set():
                began = time.perf_counter()
                with follower.read() as (model, _):
                    model(features)
                slowest[number] = max(slowest[number], time.perf_counter() - began)
                counts[number] += 1

    threads = [threading.Thread(target=predict, args=(number,)) for number in range(READERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    act()
    seconds = time.perf_counter() - began
    ends.set()
    for thread in threads:
        thread.join()
    return {
        "seconds": seconds,
        "answers_per_second": sum(counts) / seconds,
        "slowest_ms": 1e3 * max(slowest),
    }


def with_and_without(
    root: Path, run: Run, dim: int, copies: int, rounds: int, rest_seconds: float
) -> dict[str, dict[str, float]]:
    """Measure predictions while versions are applied one after the other, and while none is."""
    shown = threading.Semaphore(0)
    follower = Follower(
        root,
        quantized(Served(run.rows, dim, two=True)),
        copies=copies,
        interval_seconds=0.001,
        on_version=lambda _: shown.release(),
    )
    follower.poll()
    shown.acquire()
    for _ in range(rounds):
        run.publish()
    heads = sorted(path.name for path in root.glob("seq-*"))[-rounds:]
    aside = root.with_name("aside")
    aside.mkdir()
    for name in heads:
        (root / name).rename(aside / name)

    def apply_all() -> None:
        with follower:
            for name in heads:
                (aside / name).rename(root / name)
                shown.acquire()

    def rest() -> dict[str, float]:
        return predictions(follower, run.rows, lambda: time.sleep(rest_seconds))

    before = rest()
    applying = predictions(follower, run.rows, apply_all)
    after = rest()
    resting = {name: (before[name] + after[name]) / 2 for name in before}
    with suppress(OSError):
        aside.rmdir()
    return {"applying": applying, "resting": resting}


def measure(rows: int, dim: int, rounds: int, rest_seconds: float) -> dict[str, Any]:
    """Measure everything at one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = folder / "run"
        run = Run(root, rows, dim)
        run.publish()
        follower = Follower(root, quantized(Served(rows, dim)))
        follower.poll()
        found: dict[str, Any] = {
            "rows": rows,
            "dim": dim,
            "rounds": rounds,
            "follower": apply_speed(run, follower, dim, rounds),
        }
        del follower
        found["FBGEMM's list API"] = list_api(rows, dim, rounds)
        found["full reload"] = full_reload(folder, rows, dim, rounds)
        found["dcp.load"] = dcp_reload(folder, rows, dim, rounds)
        run.saver.close()
        run = Run(folder / "two", rows, dim, two=True)
        run.publish()
        for copies in (2, 1):
            found[f"predictions, copies={copies}"] = with_and_without(
                folder / "two", run, dim, copies, rounds, rest_seconds
            )
        run.saver.close()
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    lines = ["| | seconds | GB/s of fp32 that changed |", "|---|---:|---:|"]
    own = found["follower"]
    for name, seconds, speed in (
        ("follower, until visible", own["visible_seconds"], own["visible_gigabytes"]),
        ("follower, both copies", own["seconds"], own["gigabytes"]),
        *(
            (n, found[n]["seconds"], found[n]["gigabytes"])
            for n in ("FBGEMM's list API", "full reload", "dcp.load")
        ),
    ):
        lines.append(f"| {name} | {seconds:.3f} | {speed:.2f} |")
    lines += [
        "",
        "| predictions in 4 threads | answers/s applying | not applying | ratio | slowest applying "
        "| not applying |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for copies in (2, 1):
        case = found[f"predictions, copies={copies}"]
        on, off = case["applying"], case["resting"]
        rates = on["answers_per_second"], off["answers_per_second"]
        lines.append(
            f"| copies={copies} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[0] / rates[1]:.2f} | "
            f"{on['slowest_ms']:.0f} ms | {off['slowest_ms']:.0f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds without new versions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = measure(options.rows, options.dim, options.rounds, options.rest)
    found = {"machine": describe(), **figures}
    dist.destroy_process_group()
    print(markdown(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
