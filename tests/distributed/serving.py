"""Train models of many kinds on any number of ranks, and build what serves each from scratch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.inference.modules import quantize_inference_model

from tests.distributed import collisions, zoo
from tests.distributed.zoo import Net, Zoo, build_zoo
from torchrec_checknrun import Follower

State = dict[str, torch.Tensor]
MAPPED = {"collisions": collisions.Spec(interval=2), "mapped sequences": collisions.Spec(bag=False)}
KINDS = ["bags", "sequence", "weighted", "feature_processed", *MAPPED]


def quantized(model: nn.Module) -> Any:
    """Quantize a copy of a model as TorchRec does; feature processors only within a module."""
    outer = nn.Module()
    outer.net = copy.deepcopy(model)
    return quantize_inference_model(outer, quantization_dtype=torch.qint8).net


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "as it is": lambda model: model,
    "quantized": quantized,
}


class Counted:
    """The number of steps, as a state object."""

    def __init__(self, job: Zoo) -> None:
        self._job = job

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._job.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job.steps = state["steps"]


def trained(kind: str, seed: int) -> Zoo:
    """Build a model on all ranks, sharded by chance."""
    if kind in MAPPED:
        return collisions.build(MAPPED[kind])
    chosen = random.Random(seed)
    last = dist.get_world_size() - 1
    ways = [f"table_wise:{last}", "row_wise", f"column_wise:0,{last}"]
    if kind == "bags":
        ways.append("data_parallel")
    return build_zoo(kind, {table: chosen.choice(ways) for table in zoo.ROWS})


def served(kind: str, state: State | None = None) -> nn.Module:
    """Build the model that serves, of other weights or of a state as TorchRec loads it."""
    torch.manual_seed(9)
    if kind in MAPPED:
        model: nn.Module = collisions.net_of(MAPPED[kind], torch.device("cpu"))[0]
    else:
        module, _, _, _, width = zoo._embeddings(kind, 8, None)
        give_memory(module)
        model = Net(module, width, kind == "sequence")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    if state is not None:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model.eval()


def give_memory(module: nn.Module) -> None:
    """Put the parts of a module that are on the meta device into memory."""
    for part in list(module.modules()):
        if next(part.parameters(recurse=False), torch.empty(0)).is_meta:
            part.to_empty(device="cpu", recurse=False)


def gathered(model: nn.Module) -> State:
    """Return the state dict of all ranks, as an unsharded model would load it."""
    whole: State = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            whole[name] = value.detach().clone()
            continue
        parts: list[Any] = [None] * dist.get_world_size()
        own = [(tuple(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()]
        dist.all_gather_object(parts, own)
        whole[name] = torch.empty(value.size(), dtype=value.dtype)
        for place, tensor in (part for of_rank in parts for part in of_rank):
            spans = zip(place, tensor.shape, strict=True)
            whole[name][tuple(slice(start, start + size) for start, size in spans)] = tensor
    return whole


def differences(follower: Follower, wanted: nn.Module, question: Any) -> list[str]:
    """Compare tables, dense part, maps and answers with those of a model made from scratch."""
    found = []
    with follower.read() as (model, _), torch.no_grad():
        own = model.state_dict()
        found += [n for n, v in wanted.state_dict().items() if not torch.equal(own[n], v)]
        for answer, other in zip(model(question), wanted(question), strict=True):
            if not torch.equal(answer, other):
                found.append("answers")
    return found


class Wanted:
    """The states that were saved or published, by the root's name and the sequence number."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    def keep(self, job: Zoo, where: str, sequence: int) -> None:
        """Keep the state of all ranks, and what to ask; the first of what was saved only once."""
        kept = {"state": gathered(job.model), "question": job.batch(10**6 + job.steps)}
        path = self._folder / f"{where}-{sequence}.pt"
        if dist.get_rank() == 0 and not path.exists():
            self._folder.mkdir(exist_ok=True)
            torch.save(kept, path)

    def differences(self, follower: Follower, where: str, sequence: int, form: str) -> list[str]:
        """Compare a follower with the state that it says to serve."""
        kept = torch.load(self._folder / f"{where}-{sequence}.pt", weights_only=False)
        wanted = FORMS[form](served(self._kind, kept["state"]))
        return differences(follower, wanted, kept["question"])
