"""Build jobs whose dense parameters have any optimizer under any wrapper."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from tests.distributed.fused_on_cpu import any_fused_optimizer
from tests.distributed.layouts import Layout, LayoutJob, build
from tests.distributed.models import CollectionSpec, ModelSpec, TableSpec
from torchrec_checknrun import Checkpointer, Consecutive
from torchrec_checknrun.policy import Policy

SPEC = ModelSpec(
    (CollectionSpec("a", (TableSpec("t0", 29, 8, ("f0",)), TableSpec("t1", 24, 8, ("f1",)))),)
)
T0 = "a.embedding_bags.t0"


def layout(*shardings: str) -> dict[str, Any]:
    return asdict(Layout(dict(zip(("a.t0", "a.t1"), shardings, strict=True)), 2))


REPLICAS = layout("data_parallel", "data_parallel")
MIXED = layout("data_parallel", "row_wise")
ROWS = layout("row_wise", "row_wise")
APART = layout("table_wise:0", "table_wise:1")

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "decay": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),  # can't step on the meta device
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
}


def make(
    layout: dict[str, Any], dense: str, wrapper: str, seed: int = 0, fused: str = "adagrad"
) -> LayoutJob:
    """Make a job whose dense parameters, data-parallel tables included, have one optimizer."""
    with any_fused_optimizer():
        job = build(replace(SPEC, fused=fused).to_json(), layout, seed)
    parameters = dict(in_backward_optimizer_filter(job.model.named_parameters()))
    factory = OPTIMIZERS[dense]
    optimizer: Any
    if wrapper == "plain":
        tables = [p for name, p in parameters.items() if name.startswith("a.")]
        others = [p for name, p in parameters.items() if not name.startswith("a.")]
        groups = [{"params": tables, "lr": 0.02}] if tables else []
        optimizer = factory([*groups, {"params": others}])
    else:
        keyed = KeyedOptimizerWrapper(parameters, factory)
        if wrapper == "clipped":
            keyed = GradientClippingOptimizer(keyed, GradientClipping.NORM, 0.5)
        elif wrapper == "warm_up":
            keyed = WarmupOptimizer(keyed, [WarmupStage(WarmupPolicy.LINEAR, 8, 0.1)], lr=0.01)
        optimizer = CombinedOptimizer([job.model.fused_optimizer, ("dense", keyed)])
    return replace(job, optimizer=optimizer)


def checkpointer(root: str, job: LayoutJob, policy: Policy | None = None) -> Checkpointer:
    return Checkpointer(
        root,
        model=job.model,
        retention=None,
        state={"optimizer": job.optimizer, "job": job},
        policy=policy or Consecutive(),
        chunk_bytes=700,
    )


def save(saver: Checkpointer) -> str:
    report = saver.save()
    assert report is not None
    return report.id


def content(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested state dicts, tensors as bytes, sharded ones as this rank's part."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "local_shards"):
        items = enumerate(shard.tensor for shard in value.local_shards())
    elif isinstance(value, torch.Tensor):
        return {path: (tuple(value.shape), value.detach().numpy().tobytes())}
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= content(item, f"{path}/{key}")
    return found


def everything(job: LayoutJob) -> dict[str, Any]:
    return content({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()})


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(k for k in one.keys() | other.keys() if one.get(k, "-") != other.get(k, "-"))
